"""SIGTERM at random moments of a launch, to the launcher or a rank: which step is saved, and does the run continue?

A signal that arrives in a step stops the run after that step or the next: ranks vote as a step begins.  One that
arrives before the steps, or after them, ends the launch at once, and the latest checkpoint stays.
"""

import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.kills import marks
from benchmarks.kills.launch import kill
from benchmarks.kills.marks import Mark
from benchmarks.kills.runs import Runs, clock


@dataclass(frozen=True)
class Stopped:
    """One launch that SIGTERM has ended."""

    layout: str
    to: str
    step: int
    """The latest step that had begun on a rank when the first rank received the signal; 0: none."""
    before: int
    """The newest checkpoint before the signal."""
    saved: int
    """The newest checkpoint afterwards."""
    status: int
    seconds: float
    """From the signal to the end of the last process."""
    left: tuple[str, ...]


def steps_at(found: list[Mark], seconds: float) -> list[int]:
    """For each rank that has begun a step by then: its latest."""
    latest = {mark.rank: mark.number for mark in found
              if mark.phase == marks.STEP and mark.begins and mark.seconds <= seconds}
    return sorted(latest.values())


def stopped(runs: Runs, name: str, rng: random.Random, usual: float) -> Stopped | None:
    """Launch the run and send SIGTERM; None if the launch ends before."""
    launch, sent = runs.launch(name, "--async-save"), 0.0
    before_it, until = runs.saved(name), time.monotonic() + rng.uniform(0, usual)
    while launch.is_running() and time.monotonic() < until:
        launch.marks.read(0.02)
    ranks = {mark.rank: mark.pid for mark in launch.marks.all}
    rank = rng.choice([None, *ranks])
    if not launch.is_running():
        launch.end()
        return None
    sent = time.monotonic()
    if rank is None or not kill(ranks[rank], signal.SIGTERM):
        launch.job.launcher.send_signal(signal.SIGTERM)
    ending = launch.end()
    received = [mark.seconds for mark in launch.marks.all if mark.phase == marks.SIGNAL]
    steps = steps_at(launch.marks.all, min(received, default=sent))
    found = Stopped(runs.layout, "launcher" if rank is None else f"rank {rank}", steps[-1] if steps else 0, before_it,
                    runs.saved(name), ending.status, round(ending.seconds, 2), ending.left)
    print(f"{clock()} {found}", file=sys.stderr, flush=True)
    return found


def problems_of(found: Stopped, num_steps: int) -> list[str]:
    """What must not be.  A run that had just finished its last step ends as if there were no signal, and the launcher
    is ended by one (status -15) that comes before its handlers."""
    problems = [f"{found}: processes left"] if found.left else []
    if found.status not in (143, -signal.SIGTERM, 0) or (found.status == 0 and found.saved != num_steps):
        problems.append(f"{found}: another status")
    expected = {found.step, min(found.step + 1, num_steps)} if found.step else {found.before}
    return problems if found.saved in expected else [*problems, f"{found}: another checkpoint"]


def measure(runs: Runs, times: int, seed: int, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Stop ``times`` launches; each run is stopped until it is complete."""
    rng, whole = random.Random(seed), runs.undisturbed()
    usual = whole[-1].seconds - whole[0].seconds
    found: list[Stopped] = []
    problems: list[str] = []
    result: dict[str, Any] = {}
    num_runs = 0
    while len(found) < times:
        num_runs += 1
        name = f"SIGTERM {num_runs}"
        while (one := stopped(runs, name, rng, usual)) is not None:
            found.append(one)
            problems += problems_of(one, runs.num_steps)
            if runs.saved(name) == runs.num_steps or len(found) == times:
                if ending_status := (ending := runs.launch(name, "--async-save").end()).status:
                    problems.append(f"{name}: the last launch ended with {ending_status}:\n{ending.said[-3000:]}")
                break
        problems += runs.differences(name)
        result = {"runs": num_runs, "signals": len(found), "problems": problems,
                  "in_steps": sum(bool(one.step) for one in found),
                  "median_seconds": statistics.median(one.seconds for one in found) if found else None,
                  "most_seconds": max((one.seconds for one in found), default=None),
                  "each": [asdict(one) for one in found]}  # fmt: skip
        note(result)
    return result
