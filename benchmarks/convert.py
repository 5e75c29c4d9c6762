"""mm-convert against a plain copy of the same files, side by side in one run.

    python -m benchmarks.convert [--size 3b|small|tiny] [--rounds 3] [--caches warm cold] [--folder DIR]
    python -m benchmarks.convert --reads 72b

Makes a random Hugging Face checkpoint of the given shape, then times in turn: copying its files with fsync, and each
command at TP 1 and TP 2.  ``warm`` reads its input from the page cache, ``cold`` has it dropped before (posix_fadvise).
Times are of the work itself, planning and checksums included; starting Python and importing torch is not.  Memory is
the anonymous memory of the whole process tree, sampled.  Prints JSON; exit status 1 when a target is missed, of which
``tiny`` says nothing: it only shows that the benchmark runs.

``--reads`` times nothing: it counts what ranks read when the example of that size starts from bf16 weights.
"""

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from benchmarks.measure import command, median_ratio, num_cores, report, shipped_model, table

MAX_RATIO = {"warm": 1.4, "cold": 1.7}
MAX_MEMORY_BYTES = 512 << 20
SHARD_BYTES = 2 << 30
CHUNK_BYTES = 16 << 20
SAMPLE_SECONDS = 0.02
BF16_BYTES = 2

SIZES = {
    # (ViT layers, LLM layers, the rest of the 3B or 7B config)
    "3b": {"depth": 32, "layers": 36, "hidden": 2048, "ffn": 11008, "heads": 16, "groups": 2, "vocab": 151936},
    "tiny": {"depth": 1, "layers": 2, "hidden": 256, "ffn": 512, "heads": 2, "groups": 2, "vocab": 1024},
    "small": {"depth": 4, "layers": 4, "hidden": 3584, "ffn": 18944, "heads": 28, "groups": 4, "vocab": 1024},
}


def config(size: str) -> dict:
    """config.json of the shape; untied, so that the head is moved too, unless it is the real 3B."""
    shape = SIZES[size]
    return {
        "model_type": "qwen2_5_vl",
        "torch_dtype": "bfloat16",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["ffn"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["groups"],
        "vocab_size": shape["vocab"],
        "max_position_embeddings": 128000,
        "rope_scaling": {"mrope_section": [16, 24, 24]},
        "tie_word_embeddings": size == "3b",
        "vision_config": {
            "depth": shape["depth"], "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "out_hidden_size": shape["hidden"], "fullatt_block_indexes": [shape["depth"] - 1],
        },
    }  # fmt: skip


def make_checkpoint(directory: Path, size: str) -> None:
    """Random bytes under real names, in shards of about 2 GiB."""
    import torch

    from mm.formats.hf_config import model_from_hf
    from mm.formats.safetensors import safetensors_file
    from mm.weights.table import model_weights

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config(size)))
    shards, filled = [[]], 0
    for weight in model_weights(model_from_hf(config(size))):
        for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
            num_bytes = 2 * torch.Size(shape).numel()
            if filled and filled + num_bytes > SHARD_BYTES:
                shards.append([])
                filled = 0
            shards[-1].append((name, torch.bfloat16, shape))
            filled += num_bytes
    weight_map = {}
    for number, described in enumerate(shards, start=1):
        file = safetensors_file(f"model-{number:05d}-of-{len(shards):05d}.safetensors", described)
        weight_map |= {tensor.name: file.name for tensor in file.tensors}
        with (directory / file.name).open("wb") as opened:
            opened.write(file.pieces[0][1])
            left = file.num_bytes - len(file.pieces[0][1])
            while left:
                left -= opened.write(os.urandom(min(CHUNK_BYTES, left)))
            os.fsync(opened.fileno())
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def commands(size: str, source: Path, made: Path) -> dict[str, Callable[[Path], object]]:
    """By name: what makes the conversion to a target.  ``made`` holds what ``prepare`` made."""
    from mm.conversion import convert

    found = {}
    for tp_size in (1, 2):
        whole, halves = _layouts(size, tp_size)[0], _layouts(size, 3 - tp_size)[1]
        mm = made / f"mm_tp{tp_size}"
        found[f"hf_to_mm TP{tp_size}"] = lambda to, layout=whole: convert.hf_to_mm(source, to, layout)
        found[f"mm_to_hf TP{tp_size}"] = lambda to, mm=mm: convert.mm_to_hf(mm, source, to)
        found[f"resplit TP{tp_size} -> TP{3 - tp_size} PP2"] = (
            lambda to, mm=mm, layout=halves: convert.resplit(mm, to, None, layout))
    return found


def _layouts(size: str, tp_size: int) -> tuple:
    from mm.formats.layout import Layout

    depth, layers = SIZES[size]["depth"], SIZES[size]["layers"]
    half = layers // 2
    return Layout(((depth,),), ((layers,),), tp_size), Layout(((depth, 0),), ((half, layers - half),), tp_size)


def prepare(size: str, source: Path, made: Path) -> None:
    from mm.conversion import convert
    from mm.conversion.convert import Options

    for tp_size in (1, 2):
        convert.hf_to_mm(source, made / f"mm_tp{tp_size}", _layouts(size, tp_size)[0]).run(Options())


def copy_files(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def child(arguments: argparse.Namespace) -> None:
    """One timed piece of work in a process of its own; prints its seconds."""
    source, target = Path(arguments.source), Path(arguments.target)
    work = {"copy": lambda: copy_files(source, target)}
    if arguments.child != "copy":
        from mm.conversion.convert import Options

        make = commands(arguments.size, source, Path(arguments.made))[arguments.child]
        work[arguments.child] = lambda: make(target).run(Options())
    start = time.perf_counter()
    work[arguments.child]()
    print(json.dumps({"seconds": time.perf_counter() - start}))


def timed(name: str, size: str, source: Path, made: Path, target: Path, is_cold: bool) -> dict:
    """Seconds and peak memory of one piece of work; its input is in the page cache, or dropped from it."""
    is_hf = name == "copy" or name.startswith("hf_to_mm")
    read = source if is_hf else made / f"mm_tp{name.partition('TP')[2][0]}"
    for folder in (source, made):  # what is not read must not take the room of what is written
        for path in filter(Path.is_file, folder.rglob("*")):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not is_cold:
        for path in filter(Path.is_file, read.rglob("*")):
            with path.open("rb") as file:
                while file.read(CHUNK_BYTES):
                    pass
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    words = ["--child", name, "--size", size, "--source", str(source), "--made", str(made), "--target", str(target)]
    started = subprocess.Popen([sys.executable, "-m", "benchmarks.convert", *words], stdout=subprocess.PIPE, text=True)
    peak, done = [0], threading.Event()
    watcher = threading.Thread(target=_watch, args=(started.pid, peak, done))
    watcher.start()
    output, _ = started.communicate()
    done.set()
    watcher.join()
    shutil.rmtree(target, ignore_errors=True)
    if started.returncode:
        raise SystemExit(f"{name} failed")
    return {"seconds": json.loads(output.splitlines()[-1])["seconds"], "memory_bytes": peak[0]}


def _watch(pid: int, peak: list[int], done: threading.Event) -> None:
    while not done.wait(SAMPLE_SECONDS):
        try:
            tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            peak[0] = max(peak[0], sum(_anonymous_bytes(process.pid) for process in tree))
        except (psutil.NoSuchProcess, OSError):
            return


def _anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def measure(size: str, rounds: int, folder: Path, caches: list[str]) -> dict:
    source, made, target = folder / "hf", folder / "made", folder / "target"
    make_checkpoint(source, size)
    prepare(size, source, made)
    results = {}
    names = list(commands(size, source, made))
    for kind in caches:
        taken = {name: [] for name in ["copy", *names]}
        for _ in range(rounds):
            for name, found in taken.items():
                found.append(timed(name, size, source, made, target, kind == "cold"))
        seconds = {name: [one["seconds"] for one in runs] for name, runs in taken.items()}
        results[kind] = {
            name: {
                "seconds": statistics.median(seconds[name]),
                "ratio": median_ratio(seconds[name], seconds["copy"]),
                "memory_mib": max(one["memory_bytes"] for one in runs) >> 20,
            }
            for name, runs in taken.items()
        }
    return results


def reads(size: str, tp_size: int = 2, replicas: Sequence[int] = (1, 8, 64)) -> str:
    """A table of what ranks of the example's stages read, where each replica reads its own weights and where all read
    them once."""
    from mm.weights.memory import memory_shape
    from mm.weights.readers import readers
    from mm.weights.table import local_shape, stage_weights

    model = shipped_model(size)
    placement = model.placement()
    stages = [[weight for spec in placement.slots if spec.stage == stage for weight in stage_weights(model, spec)]
              for stage in range(placement.num_stages)]
    read_bytes = [[BF16_BYTES * math.prod(local_shape(weight, tp_size)) for weight in stage] for stage in stages]
    memory_bytes = [[BF16_BYTES * math.prod(memory_shape(weight, tp_size)) for weight in stage] for stage in stages]
    one_replica = [sum(stage) for stage in read_bytes]
    head = (f"TP {tp_size} PP {len(stages)} at DP", "not shared: most per rank", "total", "shared: most per rank",
            "total")  # fmt: skip
    rows = []
    for num_replicas in replicas:
        shares = []
        for read, memory in zip(read_bytes, memory_bytes, strict=True):
            chosen = readers(memory, num_replicas)
            shares += [sum(one for one, reader in zip(read, chosen, strict=True) if reader == rank)
                       for rank in range(num_replicas)]
        figures = (max(one_replica), num_replicas * tp_size * sum(one_replica), max(shares), tp_size * sum(shares))
        rows.append((num_replicas, *(f"{figure / 1e9:,.2f} GB" for figure in figures)))
    return "\n".join(table(head, rows))


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--caches", nargs="+", choices=MAX_RATIO, default=list(MAX_RATIO),
                        help="input in the page cache, or not")
    parser.add_argument("--reads", metavar="SIZE", help="count what ranks of this example read: 3b, 7b, 32b or 72b")
    parser.add_argument("--folder", help="where to make the files (default: the temporary directory)")
    for name in ("child", "source", "made", "target"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        child(flags)
        return 0
    if flags.reads:
        print(reads(flags.reads))
        return 0
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        results = measure(flags.size, flags.rounds, Path(folder), flags.caches)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": num_cores()}
    report({"size": flags.size, "rounds": flags.rounds, **machine, **results}, flags.output)
    missed = [
        name for kind in results for name, one in results[kind].items()
        if name != "copy" and (one["ratio"]["median"] > MAX_RATIO[kind] or one["memory_mib"] << 20 > MAX_MEMORY_BYTES)
    ]
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
