"""One rank of ``mm-doctor``: ``python -m mm.doctor.rank FOLDER DEVICE`` under a launcher, or as the only rank.

Tries the device, its kernels, the links to the other ranks, and a training step.  Rank 0 writes each finding at once,
and every rank what it begins, so that both are known after a crash or a hang.

Speed of the devices and of the links between the ranks of ``mm-doctor``, on tensors whose results are known.

One training step of a tiny model whose result is known.

The widths of its heads are those of the real models.  Weights and samples are the same on every machine, so a device
whose kernels compute something else shows.
"""

import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from mm.batch import BatchTotals, StepPlan
from mm.config.args import parse
from mm.config.model import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from mm.device.device import Device
from mm.doctor.diagnosis import Diagnosis, fault, ok, warning
from mm.doctor.trial import FOUND, begun_file
from mm.environment import Launched, launcher_problems, software
from mm.errors import refuse
from mm.model.stage import Stage
from mm.parallel.agreement import by_rank
from mm.parallel.mesh import Mesh
from mm.plan.measure import random_microbatch
from mm.process import end_with_launcher, is_first_rank, run_command, status_of
from mm.run.step import Setup, step

NUM_ELEMENTS = 1 << 22
"""In fp32: 16 MiB."""
_NUM_REPEATS = 5
_SIDE = 2048
_LATE = 2.0
"""A rank is slow if it takes more than this many times the median of all ranks."""
_CURE = ("check the links (nvidia-smi topo -m, npu-smi info -t topo), update the driver, or turn direct links off "
         "(NCCL_P2P_DISABLE=1, HCCL_INTRA_PCIE_ENABLE=1) to see which one is at fault")


def link_findings(
    device: Device, mesh: Mesh, names: Sequence[str], begin: Callable[[str], None]
) -> Iterator[Diagnosis]:
    """Collective over all ranks.  ``names``: each rank with its device; ``begin`` notes what this rank begins."""
    yield _speeds(device, mesh, names, begin)
    size, here = mesh.world_size, device.torch_device
    if size == 1:
        yield warning("links", "one rank, so no link was tried", "mm-doctor --num-processes 2, or more")
        return
    begin(f"all-reduce over {size} ranks")
    own = torch.empty(NUM_ELEMENTS, device=here)

    def all_reduce() -> bool:
        own.fill_(mesh.rank + 1.0)
        dist.all_reduce(own)
        return bool((own == size * (size + 1) / 2).all())

    seconds, is_right = _timed(all_reduce)
    wrong = [name for name, right in zip(names, by_rank(mesh, is_right), strict=True) if not right]
    speed = 2 * (size - 1) / size * own.nbytes / max(by_rank(mesh, seconds)) / 1e9
    yield fault("links", f"all-reduce over {size} ranks: wrong numbers on {', '.join(wrong)}", _CURE) if wrong else (
        ok("links", f"all-reduce over {size} ranks: {speed:.1f} GB/s in each direction (16 MiB of fp32)"))
    begin("messages to the next rank")
    arriving, sent = torch.empty(NUM_ELEMENTS, device=here), torch.full((NUM_ELEMENTS,), float(mesh.rank), device=here)

    def exchange() -> bool:
        both = [dist.P2POp(dist.isend, sent, (mesh.rank + 1) % size),
                dist.P2POp(dist.irecv, arriving, (mesh.rank - 1) % size)]
        for waiting in dist.batch_isend_irecv(both):
            waiting.wait()
        return bool((arriving == (mesh.rank - 1) % size).all())

    seconds, is_right = _timed(exchange)
    wrong = [f"from {names[rank - 1]} to {names[rank]}" for rank, right in enumerate(by_rank(mesh, is_right))
             if not right]
    speed = arriving.nbytes / max(by_rank(mesh, seconds)) / 1e9
    yield fault("links", f"messages arrive wrong {', '.join(wrong)}", _CURE) if wrong else (
        ok("links", f"messages to the next rank: {speed:.1f} GB/s (16 MiB)"))


def _timed(run: Callable[[], bool]) -> tuple[float, bool]:
    """The shortest time of ``run``, and whether its result was always right."""
    seconds, right = list[float](), list[bool]()
    for _ in range(_NUM_REPEATS):
        began = time.perf_counter()
        right.append(run())  # waits for the device
        seconds.append(time.perf_counter() - began)
    return min(seconds), all(right)


def _speeds(device: Device, mesh: Mesh, names: Sequence[str], begin: Callable[[str], None]) -> Diagnosis:
    """Whether some rank computes the same products more slowly than the others."""
    begin("matrix products")
    one = torch.full((_SIDE, _SIDE), 1.0, device=device.torch_device)
    seconds, _ = _timed(lambda: bool(((one @ one)[0, 0] == _SIDE).item()))
    of_ranks = by_rank(mesh, seconds)
    usual, slowest = median_low(of_ranks), max(of_ranks)
    name = names[of_ranks.index(slowest)]
    text = f"{_SIDE}^3 in fp32 takes {1000 * usual:.2f} ms"
    if slowest > _LATE * usual and device.platform.num_devices() is not None:  # ranks on the CPU share it
        return warning("matrix products", f"{text}, but {name} takes {slowest / usual:.1f} times as long",
                       "look at its clock, its temperature and other processes on it (nvidia-smi -q -d "
                       "CLOCK,PERFORMANCE, npu-smi info, top)")
    return ok("matrix products", f"{text}, and on the slowest, {name}, {1000 * slowest:.2f}")


GOLDEN = {"loss": 6.934884, "grad_norm": 12.055017}
"""Loss and gradient norm on the CPU in fp32."""
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Relative to ``GOLDEN``.  Measured on the CPU, torch 2.7.1 and 2.13: 1.5e-7 in fp32; 3.2e-4 (loss) and 9.9e-4 (norm)
in bf16.  No accelerator has run it yet.  A norm that is 1% off changes both by 1.8e-3 and 1.4e-2."""
_SAMPLES = ([(1, 12, 20)], 40), ([], 24), ([(1, 8, 8)], 9)
"""Patch grids of each sample's pictures, and the number of text tokens after them."""
_FLAGS = ("--mm-model", "-", "--mm-data", "-", "--micro-batch-size", "1", "--seq-length", "1024", "--train-iters", "1",
          "--lr", "1e-3", "--clip-grad", "0")
_DEVIATION = 0.08


def model() -> ModelConfig:
    """Two layers of each tower, one with window and one with full attention, with heads of 80 and of 128."""
    return ModelConfig(
        vision=VisionConfig(
            num_layers=2, pipeline_num_layers=((2,),), hidden_size=160, ffn_hidden_size=200, num_attention_heads=2,
            window_attn_size=112, fullatt_block_indexes=(1,), freeze=False),
        projector=ProjectorConfig(input_size=160, ffn_hidden_size=640, hidden_size=256),
        language=LanguageConfig(
            num_layers=2, pipeline_num_layers=((2,),), hidden_size=256, ffn_hidden_size=320, num_attention_heads=2,
            num_query_groups=1, vocab_size=512, max_position_embeddings=1024, mrope_section=(16, 24, 24)),
        image_token_id=501, video_token_id=502, vision_start_token_id=503)  # fmt: skip


def trained_step(device: Device, mesh: Mesh, precision: str) -> dict[str, float]:
    """Train one step, the same on every data-parallel rank, and return its loss and gradient norm."""
    args = replace(parse(_FLAGS), bf16=precision == "bf16", global_batch_size=mesh.dp_size)
    stage = Stage(model(), mesh, precision, device)
    _fill(stage)
    setup = Setup.build(stage, mesh, args)
    microbatch = random_microbatch(model(), _SAMPLES)
    totals = BatchTotals.of([microbatch] * mesh.dp_size, model().vision)
    result = step(setup, StepPlan((microbatch,), totals), args.lr)
    return {"loss": result.loss, "grad_norm": result.grad_norm}


def _fill(stage: Stage) -> None:
    """Draw each weight with a seed that follows from its name; numpy promises that this old generator gives the same
    numbers in all versions."""
    with torch.no_grad():
        for weight, values in stage.whole_weights(stage.weights):
            drawn = np.random.RandomState(zlib.crc32(weight.name.encode())).standard_normal(tuple(values.shape))
            is_norm = len(values.shape) == 1 and not weight.name.endswith("bias")
            values.copy_(torch.from_numpy(drawn * _DEVIATION + is_norm))


if TYPE_CHECKING:
    from mm.device.device import Device
    from mm.parallel.mesh import Mesh


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if this device cannot be used."""
    end_with_launcher()
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: status_of(lambda: _examine(Path(words[0]), words[1])), lambda: "nothing was written",
                       is_rank=True)


def _examine(folder: Path, wanted: str) -> int:
    refuse(launcher_problems(os.environ))
    with open(begun_file(folder, Launched.here().rank), "w", encoding="utf-8", buffering=1) as stream:
        def begin(task: str) -> None:
            stream.write(f"{task}\n")

        begin("device")
        from mm.device.device import Device, installed_versions

        device = Device.pick(wanted)
        begin("meeting the other ranks")
        # megatron looks at the device while it is imported, so everything built on it comes after this
        from mm.doctor.rank import link_findings, model
        from mm.parallel import mesh as parallel
        from mm.parallel.agreement import by_rank

        mesh = parallel.start(device, model(), tp_size=1)
        names = by_rank(mesh, f"rank {mesh.rank} ({device.torch_device} of {socket.gethostname()})")
        facts = by_rank(mesh, {**software(), **installed_versions()})
        with open(folder / FOUND if is_first_rank() else os.devnull, "w", encoding="utf-8", buffering=1) as found:
            found.writelines(one.line() for one in chain(
                _device(device), _different(facts, names), link_findings(device, mesh, names, begin),
                _steps(device, mesh, begin)))
        begin("end")
        parallel.stop()
    return 0


def _device(device: "Device") -> Iterator[Diagnosis]:
    from mm.device.device import kernel_name

    yield ok("device", f"{device.platform.name}: {device.name}")
    for note in device.notes:
        yield warning("device", note, "follow the advice in this note")
    yield ok("kernels", ", ".join(f"{field.name} {kernel_name(getattr(device.kernels, field.name))}"
                                  for field in fields(device.kernels)))


def _different(facts: Sequence[Mapping[str, str]], names: Sequence[str]) -> Iterator[Diagnosis]:
    """Ranks with other versions or other code than rank 0."""
    for name, own in zip(names, facts, strict=True):
        found = [f"{key} is {own.get(key, 'absent')}, on rank 0 {facts[0].get(key, 'absent')}"
                 for key in sorted({*own, *facts[0]}) if own.get(key) != facts[0].get(key)]
        if found:
            yield fault("nodes differ", f"{name}: {'; '.join(found)}",
                        "install the same on every node, and copy the same code there")


def _steps(device: "Device", mesh: "Mesh", begin: Callable[[str], None]) -> Iterator[Diagnosis]:
    from mm.doctor.rank import GOLDEN, TOLERANCE, trained_step

    for precision, tolerance in TOLERANCE.items():
        begin(f"training step in {precision}")
        found = trained_step(device, mesh, precision)
        text = ", ".join(f"{name} {found[name]:.6f} (expected {GOLDEN[name]:.6f})" for name in GOLDEN)
        if all(abs(found[name] / GOLDEN[name] - 1) <= tolerance for name in GOLDEN):
            yield ok(f"training step in {precision}", text)
        else:
            yield fault(f"training step in {precision}", text,
                        "a device computes something else: try each alone (--num-processes 1), update the driver and "
                        "the device's libraries to a pair of versions that was tested, and report it (--report)")


if __name__ == "__main__":
    sys.exit(main())
