"""How fast one rank saves a training checkpoint in overlapping blocks, against one step at a time.

    python -m benchmarks.save [--device cpu|cuda|npu] [--mib 2048] [--rounds 5] [--block-mib N ...] [--folder DIR]

Makes tensors of a transformer's shapes on the device, bf16 weights and three fp32 tensors for each, and saves them in
two ways in turn: one after another (each tensor is copied to the host, written, checksummed), and in blocks, as in
training.  Both flush to disk, and the files are compared byte for byte.  Then it compares how long training waits for a
save with and without ``--async-save``: for the copy to host memory, and for the whole save.  Prints JSON: the medians
of seconds and of ratios.
"""

import math
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from filecmp import cmp
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import DEVICES, command, median_ratio, num_cores, report, versions
from mm.checkpoint.pipelined_write import BLOCK_BYTES, HostCopies, Values, write_tensors
from mm.checkpoint.training_files import new_file
from mm.device.device import Device

HIDDEN = 2048


def shapes_of(hidden: int) -> tuple[tuple[int, ...], ...]:
    """The weights of one layer."""
    ffn = 4 * hidden
    return (3 * hidden, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn), (hidden,), (hidden,)


def layers(num_bytes: int, device: torch.device) -> list[tuple[str, Tensor]]:
    """Weights with moments and fp32 copies: as many layers as fill ``num_bytes``, narrower ones if it is small."""
    hidden = HIDDEN
    while hidden > 1 and 14 * sum(map(math.prod, shapes_of(hidden))) > num_bytes:
        hidden //= 2
    found: list[tuple[str, Tensor]] = []
    generator = torch.Generator(device).manual_seed(0)
    while not found or sum(tensor.nbytes for _, tensor in found) < num_bytes:
        for shape in shapes_of(hidden):
            for dtype in (torch.bfloat16, *[torch.float32] * 3):
                tensor = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
                found.append((str(len(found)), tensor))
    return found


def one_after_another(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> dict[str, int]:
    """Save as this trainer did until 2026-11-23."""
    crc32s = {}
    with new_file(path) as opened:
        for name, tensor in tensors:
            data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            opened.write(data)
            crc32s[name] = zlib.crc32(data)
    return crc32s


def in_blocks(path: Path, tensors: Sequence[tuple[str, Tensor]], device: Device, block_bytes: int) -> dict[str, int]:
    with new_file(path) as opened:
        return write_tensors(opened, [(name, Values(tensor)) for name, tensor in tensors], device.runtime, block_bytes)


def in_turn(works: Sequence[Callable[[], Any]], device: Device, is_second_first: bool) -> tuple[list[float], list[Any]]:
    """Run two pieces of work one after the other; returns their seconds and their results."""
    seconds, results = [0.0, 0.0], [None, None]
    for index in (1, 0) if is_second_first else (0, 1):
        device.runtime.synchronize()
        os.sync()
        began = time.perf_counter()
        results[index] = works[index]()
        seconds[index] = time.perf_counter() - began
    return seconds, results


def summary(slow: Sequence[float], fast: Sequence[float]) -> dict[str, Any]:
    return {"seconds_before": statistics.median(slow), "seconds": statistics.median(fast),
            "times_as_fast": median_ratio(slow, fast)}


def measure(device: Device, num_bytes: int, rounds: int, block_sizes: Sequence[int], folder: Path) -> dict:
    tensors = layers(num_bytes, device.torch_device)
    old, new = folder / "old", folder / "new"
    taken: dict[str, list[list[float]]] = {}
    copies, live = HostCopies(device.runtime), [Values(tensor) for _, tensor in tensors]
    for number in range(rounds + 1):  # the first warms up
        for block_bytes in block_sizes:
            works = [partial(one_after_another, old, tensors), partial(in_blocks, new, tensors, device, block_bytes)]
            pair, sums = in_turn(works, device, number % 2 == 1)
            assert sums[0] == sums[1] and cmp(old, new, shallow=False), "both ways write the same"
            old.unlink()
            new.unlink()
            if number:
                taken.setdefault(f"save, blocks of {block_bytes / 2**20:g} MiB", []).append(pair)
        waits = [partial(in_blocks, new, tensors, device, block_sizes[0]), partial(copies.take, live)]
        pair, _ = in_turn(waits, device, number % 2 == 1)
        new.unlink()
        if number:
            taken.setdefault("wait for --async-save", []).append(pair)
    return {name: summary(*zip(*pairs, strict=True)) for name, pairs in taken.items()}


def main(argv: list[str]) -> None:
    parser = command(__doc__)
    parser.add_argument("--device", default="auto", choices=DEVICES)
    parser.add_argument("--mib", type=float, default=2048, help="size of the file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-mib", type=float, nargs="+", default=[BLOCK_BYTES / 2**20])
    parser.add_argument("--folder", help="where to make the files (default: the temporary directory)")
    flags = parser.parse_args(argv)
    device = Device.pick(flags.device)
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        sizes = [int(size * 2**20) for size in flags.block_mib]
        found = measure(device, int(flags.mib * 2**20), flags.rounds, sizes, Path(folder))
    report({"device": device.name, "cores": num_cores(), "mib": flags.mib, "rounds": flags.rounds,
          "versions": versions(), **found}, flags.output)


if __name__ == "__main__":
    main(sys.argv[1:])
