"""Trains under signals, kills and stopped processes, and compares every loss and weight with an undisturbed run.

    python -m benchmarks.soak [--minutes 10] [--seed 0] [--only EVENT ...] [--output FILE.json]

The same command is started again and again: real ranks under ``mm.launch``, with real data workers, on one layout at a
time.  Each launch but the last of a run is disturbed by one event at a random moment, from the start of Python to the
export.  Reported for each kind of event: how often, the seconds from the event to the end of the last process (median
and most), the statuses of the launcher, and how many processes were left.  A complete run must equal one that nothing
disturbed, to the bit: its metrics, weights and optimizer state.  The exit status is 1 if one does not, or if a process
was left.
"""

import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.job import Job
from benchmarks.measure import command, report
from tests.files import json_lines
from tests.tiny_inputs import flags_of, write_inputs

NUM_STEPS = 150
LATEST_SECONDS = 16.0
"""Events come up to this long after the launch; an undisturbed launch takes a little longer on two cores."""
LEFT_SECONDS = 5.0
"""A process that is alive this long after the launcher has ended is left."""
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "PP 2": (2, 2, ()),
    "DP 2": (1, 2, ("--use-distributed-optimizer",)),
    "TP 2": (1, 2, ("--tensor-model-parallel-size", "2")),
}
"""Stages, ranks and flags."""
COMPARED = ("iteration", "loss", "grad_norm", "lr", "consumed_samples", "num_tokens")


@dataclass
class Events:
    """What happened to the launches that one kind of event disturbed."""

    seconds: list[float] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    num_left: int = 0

    def to_json(self) -> dict[str, Any]:
        statuses = {str(status): self.statuses.count(status) for status in sorted(set(self.statuses))}
        return {"count": len(self.seconds), "median_seconds": round(statistics.median(self.seconds), 2),
                "most_seconds": round(max(self.seconds), 2), "statuses": statuses, "processes_left": self.num_left}


def to_launcher(number: int) -> Callable[[Job, random.Random], None]:
    return lambda job, _: job.launcher.send_signal(number)


def to_one(choose: Callable[[Job], list[psutil.Process]], number: int) -> Callable[[Job, random.Random], None]:
    """Send the signal to one of the processes; to the launcher if there are none yet, or no longer."""
    def send(job: Job, rng: random.Random) -> None:
        chosen = sorted(choose(job), key=lambda process: process.pid)
        (rng.choice(chosen) if chosen else job.launcher).send_signal(number)

    return send


EVENTS: dict[str, Callable[[Job, random.Random], None]] = {
    "SIGTERM to the launcher": to_launcher(signal.SIGTERM),
    "SIGUSR1 to the launcher": to_launcher(signal.SIGUSR1),
    "SIGUSR1 to a rank": to_one(Job.ranks, signal.SIGUSR1),
    "SIGKILL to a rank": to_one(Job.ranks, signal.SIGKILL),
    "SIGKILL to the launcher": to_launcher(signal.SIGKILL),
    "SIGKILL to a data worker": to_one(Job.workers, signal.SIGKILL),
    "SIGSTOP to a rank": to_one(Job.ranks, signal.SIGSTOP),
}


def words_of(inputs: Path, name: str, layout: str) -> list[str]:
    num_stages, _, flags = LAYOUTS[layout]
    return flags_of(inputs, name, num_stages, "--num-workers", "1", "--train-iters", str(NUM_STEPS), "--load",
                    str(inputs / "hf"), "--deterministic-mode", "--async-save", "--save-interval", "10",
                    "--keep-last-checkpoints", "2", "--export-hf", str(inputs / name / "hf"), "--step-timeout", "20",
                    "--distributed-timeout-minutes", "1", "--check-weights-interval", "50", "--phase-timeouts",
                    "check=20", "start=20", "load=20", "data=20", "save=20", "export=20", "between=20",
                    *flags)  # fmt: skip


def disturb(job: Job, event: str, rng: random.Random, found: Events) -> None:
    """Send the event at a random moment, and wait for the end of all processes."""
    until = time.monotonic() + rng.uniform(0, LATEST_SECONDS)
    while job.launcher.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    if job.launcher.poll() is not None:
        return
    sent = time.monotonic()
    EVENTS[event](job, rng)
    found.statuses.append(job.wait())
    ended = time.monotonic()
    while (left := job.processes()) and time.monotonic() < ended + LEFT_SECONDS:
        time.sleep(0.05)
    found.seconds.append(time.monotonic() - sent)
    found.num_left += len(left)
    for process in left:
        process.kill()


def differences(inputs: Path, name: str, other: str) -> list[str]:
    """Where the two complete runs differ."""
    rows = [[[row[key] for key in COMPARED] for row in json_lines(inputs / one / "logs" / "metrics.jsonl")
             if row["kind"] == "step"] for one in (name, other)]
    found = [] if rows[0] == rows[1] and len(rows[0]) == NUM_STEPS else [f"{name}: other metrics"]
    folders = [inputs / one / "save" / f"iter_{NUM_STEPS:07d}" for one in (name, other)]
    for file in sorted(path.name for path in folders[1].glob("*.safetensors")):
        if (folders[0] / file).read_bytes() != (folders[1] / file).read_bytes():
            found.append(f"{name}: another {file}")
    return found


def soak(inputs: Path, seconds: float, seed: int, events: Sequence[str]) -> dict[str, Any]:
    rng, by_event, problems = random.Random(seed), defaultdict(Events), []
    until, num_launches, num_runs, output = time.monotonic() + seconds, 0, 0, inputs / "output"
    for layout in LAYOUTS:
        status = Job(words_of(inputs, f"{layout} whole", layout), LAYOUTS[layout][1], output).wait()
        if status:
            raise RuntimeError(f"the undisturbed run ended with {status}:\n{output.read_text()}")
    waiting: list[str] = []
    while time.monotonic() < until:
        layout, name = list(LAYOUTS)[num_runs % len(LAYOUTS)], f"run {num_runs}"
        words, num_ranks, num_runs = words_of(inputs, name, layout), LAYOUTS[layout][1], num_runs + 1
        for is_last in (False, False, False, True):
            job, num_launches = Job(words, num_ranks, output), num_launches + 1
            if is_last:
                if status := job.wait():
                    problems.append(f"{name} ({layout}): the last launch ended with {status}")
                break
            waiting = waiting or rng.sample(list(events), len(events))
            event = waiting.pop()
            disturb(job, event, rng, by_event[event])
            print(f"{time.strftime('%H:%M:%S')} {name} ({layout}): {event}", file=sys.stderr, flush=True)
        problems += differences(inputs, name, f"{layout} whole")
    problems += [f"{event}: {found.num_left} processes left" for event, found in by_event.items() if found.num_left]
    return {"minutes": seconds / 60, "seed": seed, "launches": num_launches, "complete_runs": num_runs,
            "events": {event: found.to_json() for event, found in sorted(by_event.items()) if found.seconds},
            "problems": problems}


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=EVENTS, default=list(EVENTS), metavar="EVENT",
                        help=f"of {', '.join(EVENTS)}")
    parser.add_argument("--keep", type=Path, help="directory for all files, which are then kept")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        inputs = flags.keep or Path(folder)
        inputs.mkdir(parents=True, exist_ok=True)
        found = soak(write_inputs(inputs), 60 * flags.minutes, flags.seed, flags.only)
    report(found, flags.output)
    return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
