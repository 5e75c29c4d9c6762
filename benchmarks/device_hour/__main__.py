"""Measures on a device what docs/performance.md says about accelerators, the most valuable first.

    python -m benchmarks.device_hour --list
    python -m benchmarks.device_hour --output runs/device [--steps parity ceilings ...] [--within 720]

Runs a list of commands, correctness first, each in a new process with a time limit, and continues after one that
fails.  It writes to ``--output``: ``records.jsonl`` (each result at once, and how each command ended), ``log.txt`` (all
output), ``profile.txt`` (the operators of one step) and ``tables.md`` (the results as docs/performance.md shows them;
``python -m benchmarks.device_hour.render`` puts them there).  Commands that are recorded as done do not run again
unless ``--steps`` names them, so the same line continues after an interruption.  ``--within SECONDS`` skips a command
if less than half of its limit is left, and shortens the limits of others to the time left.  Its default, 720, leaves
three minutes of a quarter of an hour for the start of the machine.

A machine needs this repository, torch for its device, transformers, megatron-core and the few packages that setup.py
lists.  Where nothing can be installed, put wheels of the missing packages beside the repository and unpack them into a
folder:

    python -m pip install --no-index --no-deps --target .site WHEELS/*.whl
    export PYTHONPATH=.site
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.device_hour.render import block
from benchmarks.records import append, read_records
from tests.files import ROOT

TAIL_CHARACTERS = 1500
FROZEN = ("--freeze", "vision", "projector")
HALVES = ("--tokens", "4096", "--num-microbatches", "2")
"""transformers computes logits of all tokens, including padding; with 8192 they do not fit 141 GB."""
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    # shapes differ from step to step; without this the allocator's gaps grow
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
}
"""Environment of every command; variables that the caller has set take precedence."""


@dataclass(frozen=True)
class Step:
    """One command of the hour."""

    name: str
    limit_seconds: int
    purpose: str
    """The figures that it measures."""
    words: tuple[str, ...]
    """The command after ``python -m``; {records} and {output} stand for the paths."""


def _speed(*words: str, size: str = "3b", peer: bool = False) -> tuple[str, ...]:
    alone = () if peer else ("--no-peer",)
    return ("benchmarks.step", "speed", "--size", size, "--phases", "--ceilings", "{records}", *words, *alone)


STEPS = (
    Step("tests", 90, "correctness", ("pytest", "-q", "-W", "default", "tests/device", "-k", "cuda")),
    Step("ceilings", 40, "ceilings of products and copies", ("benchmarks.kernels", "ceilings")),
    Step("step", 90, "FLOP/s, optimizer and memory of a 3B step", _speed("--mix")),
    Step("parity", 180, "correctness", ("benchmarks.step", "parity")),
    Step("mixed", 200, "speed over transformers on mixed samples, which it pads",
         _speed("--mix", *HALVES, "--rounds", "2", "--warmup", "2", "--steps", "5", peer=True)),
    Step("large", 100, "FLOP/s and memory of a 7B step",
         _speed("--num-microbatches", "4", "--recompute", *FROZEN, size="7b")),
    Step("kernels", 120, "forms of attention", ("benchmarks.kernels", "attention")),
    Step("train", 150, "correctness of the program itself", ("benchmarks.step", "train")),
    Step("profile", 90, "where the time of a step goes", _speed("--steps", "3", "--profile", "{output}/profile.txt")),
    Step("recompute", 90, "memory of a 3B step with recomputation", _speed("--mix", "--recompute")),
    Step("offload", 90, "time of a 3B step with activations in host memory", _speed("--mix", "--offload")),
    Step("equal", 150, "speed over transformers on equal samples",
         _speed(*HALVES, "--warmup", "2", "--steps", "5", peer=True)),
)  # fmt: skip

REHEARSAL = {
    "tests": ("-k", "cuda_float32_path"),
    "parity": ("--device", "cpu", "--precision", "fp32"),
    "train": ("--device", "cpu"),
}
REHEARSED_KERNELS = ("--device", "cpu", "--size", "tiny")
REHEARSED_STEP = (*REHEARSED_KERNELS, "--tokens", "400", "--num-microbatches", "2", "--rounds", "1", "--warmup", "1",
                  "--steps", "1")  # fmt: skip
"""Words that ``--rehearse`` appends; they override earlier ones."""


def rehearsed(step: Step) -> Step:
    """The same command at a tiny size on the CPU."""
    default = REHEARSED_STEP if "speed" in step.words else REHEARSED_KERNELS
    return replace(step, words=(*step.words, *REHEARSAL.get(step.name, default)))


def command(step: Step, output: Path) -> list[str]:
    """The words that run ``step``, with the records' path and the step's name if the program takes them."""
    words = [word.format(records=output / "records.jsonl", output=output) for word in step.words]
    ours = [] if step.words[0] == "pytest" else ["--records", str(output / "records.jsonl"), "--label", step.name]
    return [sys.executable, "-m", *words, *ours]


def run(step: Step, output: Path) -> bool:
    """Run one command to its end or its limit, and record how it ended; returns whether it succeeded."""
    records, log = output / "records.jsonl", output / "log.txt"
    append(records, {"kind": "begin", "label": step.name})
    words, start = command(step, output), time.monotonic()
    with log.open("ab") as file:
        file.write(f"\n== {step.name}: {' '.join(words)}\n".encode())
        file.flush()
        offset = file.tell()
        # in a new session, so that at the limit its children end too
        child = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                                 env={**ENVIRONMENT, **os.environ})  # fmt: skip
        try:
            status: int | str = child.wait(step.limit_seconds)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = f"ended at its limit of {step.limit_seconds} s"
    seconds = time.monotonic() - start
    tail = log.read_bytes()[offset:].decode(errors="replace")[-TAIL_CHARACTERS:]
    append(records, {"kind": "command", "label": step.name, "status": status, "seconds": round(seconds, 1),
                     "words": step.words, **({} if status == 0 else {"tail": tail})})  # fmt: skip
    print(f"{step.name}: {'done' if status == 0 else status} in {seconds:.0f} s", flush=True)
    if status != 0:
        print(tail, flush=True)
    return status == 0


def chosen(names: list[str] | None, output: Path) -> list[Step]:
    """The named steps; without names, all that are not recorded as done."""
    if names is not None:
        return [step for step in STEPS if step.name in names]
    records = output / "records.jsonl"
    ended = read_records(records) if records.exists() else []
    done = {one["label"] for one in ended if one["kind"] == "command" and one["status"] == 0}
    return [step for step in STEPS if step.name not in done]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in STEPS]
    parser.add_argument("--output", type=Path, default=Path("runs/device"), help="folder for all files")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    parser.add_argument("--steps", nargs="+", choices=names, metavar="NAME", help=f"only these: {', '.join(names)}")
    parser.add_argument("--within", type=int, default=720, metavar="SECONDS", help="end within this time; see above")
    parser.add_argument("--limit", nargs="+", default=[], metavar="NAME=SECONDS", help="other limits of steps")
    parser.add_argument("--rehearse", action="store_true", help="a tiny size on the CPU: shows that it runs")
    flags = parser.parse_args(argv)
    try:
        pairs = [pair.split("=") for pair in flags.limit]
        flags.limit = {name: int(seconds) for name, seconds in pairs}
    except ValueError:
        parser.error(f"--limit is {' '.join(flags.limit)}; expected NAME=SECONDS")
    if unknown := flags.limit.keys() - set(names):
        parser.error(f"--limit names {', '.join(sorted(unknown))}; the steps are {', '.join(names)}")
    return flags


def main(argv: list[str]) -> int:
    flags, start = parse(argv), time.monotonic()
    output = flags.output.resolve()
    steps = [rehearsed(step) if flags.rehearse else step for step in chosen(flags.steps, output)]
    steps = [replace(step, limit_seconds=flags.limit.get(step.name, step.limit_seconds)) for step in steps]
    if flags.list:
        for step in steps:
            print(f"{step.name} (at most {step.limit_seconds} s; {step.purpose}):")
            print(f"  python {' '.join(command(step, output)[1:])}")
        return 0
    output.mkdir(parents=True, exist_ok=True)
    failed, left = [], []
    for step in steps:
        remaining = flags.within - (time.monotonic() - start)
        if remaining < step.limit_seconds / 2:
            left.append(step.name)
        elif not run(replace(step, limit_seconds=min(step.limit_seconds, int(remaining))), output):
            failed.append(step.name)
    tables = block(read_records(output / "records.jsonl")) if (output / "records.jsonl").exists() else block([])
    (output / "tables.md").write_text(tables, encoding="utf-8")
    print(tables)
    for what, names in (("failed", failed), ("no time left for", left)):
        if names:
            print(f"{what}: {' '.join(names)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
