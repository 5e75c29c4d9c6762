"""mm-convert against a plain copy of the same files, side by side in one run.

    python -m benchmarks.convert [--size 3b|tiny] [--rounds 3] [--caches warm cold] [--folder DIR]
    python -m benchmarks.convert --reads 72b

Makes a random Hugging Face checkpoint of the given shape, then times in turn: copying its files with fsync, and each
command at TP 1 and TP 2.  ``warm`` reads the input from the page cache; ``cold`` drops it from there first
(posix_fadvise).  Times include planning and checksums, but not starting Python and importing torch.  Memory is the
anonymous memory of the whole process tree, sampled.  Prints JSON; the exit status is 1 when a target is missed.
``tiny``, at TP 1 alone, only shows that the benchmark runs.

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.measure import command, median_ratio, num_cores, report, seconds_of, shipped_model
from mm.checkpoint import convert
from mm.checkpoint.directories import sync
from mm.checkpoint.hf_config import model_from_hf
from mm.checkpoint.mindspeed_layout import Layout
from mm.checkpoint.safetensors import safetensors_file
from mm.families.qwen2_5_vl import published_config
from mm.weights.fuse import local_shape
from mm.weights.shard import memory_shape, readers
from mm.weights.table import model_weights, stage_weights
from tests.files import table

MAX_RATIO = {"warm": 1.4, "cold": 1.7}
MAX_MEMORY_BYTES = 512 << 20
SHARD_BYTES = 2 << 30
CHUNK_BYTES = 16 << 20
SAMPLE_SECONDS = 0.02
BF16_BYTES = 2
SIZES = ("3b", "tiny")


def config(size: str) -> dict[str, Any]:
    """The published config.json of 3B.  ``tiny`` has fewer and narrower layers, and is untied, so that the head is
    converted too."""
    published = published_config("3B")
    if size == "3b":
        return published
    vision = {"depth": 1, "out_hidden_size": 256, "fullatt_block_indexes": [0]}
    return published | {
        "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2,
        "vocab_size": 1024, "tie_word_embeddings": False, "vision_config": published["vision_config"] | vision,
    }  # fmt: skip


def make_checkpoint(directory: Path, size: str) -> None:
    """Random bytes under real names, in shards of about 2 GiB."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config(size)))
    shards, filled = [[]], 0
    for weight in model_weights(model_from_hf(config(size))):
        for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
            num_bytes = BF16_BYTES * math.prod(shape)
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


def commands(size: str, source: Path, made: Path) -> dict[str, Callable[[Path], convert.Conversion]]:
    """The conversions by name, each a function of its target.  Those that read MM checkpoints take those in ``made``,
    which ``prepare`` wrote."""
    found = {}
    for tp_size in (1, 2) if size == "3b" else (1,):
        whole, halves = _layouts(size, tp_size)[0], _layouts(size, 3 - tp_size)[1]
        mm = made / f"mm_tp{tp_size}"
        found[f"hf_to_mm TP{tp_size}"] = lambda to, layout=whole: convert.hf_to_mm(source, to, layout)
        found[f"mm_to_hf TP{tp_size}"] = lambda to, mm=mm: convert.mm_to_hf(mm, source, to)
        found[f"resplit TP{tp_size} -> TP{3 - tp_size} PP2"] = (
            lambda to, mm=mm, layout=halves: convert.resplit(mm, to, None, layout))
    return found


def _layouts(size: str, tp_size: int) -> tuple[Layout, Layout]:
    """The model on one stage and on two."""
    shape = config(size)
    depth, layers = shape["vision_config"]["depth"], shape["num_hidden_layers"]
    half = layers // 2
    return Layout(((depth,),), ((layers,),), tp_size), Layout(((depth, 0),), ((half, layers - half),), tp_size)


def prepare(size: str, source: Path, made: Path) -> None:
    for tp_size in (1, 2):
        convert.hf_to_mm(source, made / f"mm_tp{tp_size}", _layouts(size, tp_size)[0]).run()


def copy_files(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        sync(target / path.name)


def child(flags: argparse.Namespace) -> None:
    """Run one timed piece of work in this process, and print its seconds."""
    source, target = Path(flags.source), Path(flags.target)

    def work() -> None:
        if flags.child == "copy":
            copy_files(source, target)
        else:
            commands(flags.size, source, Path(flags.made))[flags.child](target).run()

    print(json.dumps({"seconds": seconds_of(work)}))


def timed(name: str, size: str, source: Path, made: Path, target: Path, is_cold: bool) -> dict:
    """Seconds and peak memory of one conversion or of the copy, which find their input in the page cache or not."""
    is_hf = name == "copy" or name.startswith("hf_to_mm")
    read = source if is_hf else made / f"mm_tp{name.partition('TP')[2][0]}"
    for folder in (source, made):  # files that are not read must leave the cache to those that are written
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
    """A table of the bytes that ranks of the example's stages read: if each replica reads all its weights, and if the
    replicas share the reading."""
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
