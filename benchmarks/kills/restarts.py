"""Runs that go on without a hand: ``--max-restarts 3`` under random kills, and another number of ranks on the way."""

import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.kills import marks
from benchmarks.kills.launch import Launch, kill
from benchmarks.kills.marks import Mark
from benchmarks.kills.runs import Runs, clock
from tests.files import json_lines

MAX_RESTARTS = 3
SIZES = (4, 2, 3)
"""Numbers of ranks, one after another."""
EXACT = ("iteration", "consumed_samples", "lr", "num_tokens", "num_target_tokens", "num_patches", "num_images")
CLOSE = 1e-6
"""How far losses may be from those of the undisturbed run, relative: another number of ranks sums the same gradients
in another order."""


def killed_again_and_again(launch: Launch, rng: random.Random, usual: float) -> list[str]:
    """Kill a random rank at a random moment of each attempt but the last; what was killed, and when."""
    found: list[str] = []
    for attempt in range(MAX_RESTARTS):
        if not launch.wait_until(lambda new, attempt=attempt: any(mark.attempt == attempt for mark in new)):
            break
        until = time.monotonic() + rng.uniform(0, usual)
        while launch.is_running() and time.monotonic() < until:
            launch.marks.read(0.02)
        ranks = {mark.rank: mark.pid for mark in launch.marks.all if mark.attempt == attempt}
        rank = rng.choice(sorted(ranks))
        if launch.is_running() and kill(ranks[rank], signal.SIGKILL):
            found.append(f"rank {rank} in {', '.join(sorted(launch.marks.open_at(rank))) or 'between phases'}")
    return found


def restarted(runs: Runs, name: str, rng: random.Random, usual: float) -> tuple[list[str], list[str]]:
    """One launch that is killed and restarted by the launcher: what was killed, and problems."""
    launch = runs.launch(name, "--async-save", launcher_words=("--max-restarts", str(MAX_RESTARTS)))
    kills = killed_again_and_again(launch, rng, usual)
    ending = launch.end()
    print(f"{clock()} {runs.layout} {name}: {kills}, status {ending.status}", file=sys.stderr, flush=True)
    problems = [] if not ending.status and not ending.left else [
        f"{name}: status {ending.status}, {len(ending.left)} left:\n{ending.said[-3000:]}"]
    attempts = max((mark.attempt for mark in launch.marks.all), default=0)
    problems += [] if attempts == len(kills) else [f"{name}: {attempts} restarts after {len(kills)} kills"]
    return kills, problems + runs.differences(name)


def measure(runs: Runs, times: int, seed: int, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """``times`` launches, each with up to three kills."""
    rng, whole = random.Random(seed), runs.undisturbed()
    usual = (whole[-1].seconds - whole[0].seconds) / 2  # three kills find time
    kills: list[list[str]] = []
    problems: list[str] = []
    result: dict[str, Any] = {}
    for number in range(times):
        killed, more = restarted(runs, f"restarted {number + 1}", rng, usual)
        kills.append(killed)
        problems += more
        result = {"launches": len(kills), "kills": sum(map(len, kills)), "each": kills, "problems": problems}
        note(result)
    return result


# Another number of ranks


def samples_of(found: list[Mark]) -> dict[int, list[int]]:
    """For each complete step, its samples over all ranks, in ascending order; the latest time counts."""
    by_step: dict[int, dict[int, list[int]]] = {}
    for mark in found:
        if mark.phase == marks.STEP and not mark.begins:
            by_step.setdefault(mark.number, {})[mark.rank] = [one for group in mark.samples for one in group]
    return {step: sorted(one for of_rank in ranks.values() for one in of_rank) for step, ranks in by_step.items()}


def resized(runs: Runs, seed: int) -> dict[str, Any]:
    """A run of data-parallel ranks that is killed and goes on with another number of them, twice."""
    rng, name, problems = random.Random(seed), "resized", []
    whole = runs.undisturbed(SIZES[0])
    samples: dict[int, list[int]] = {}
    changes: list[int] = []
    for number, size in enumerate(SIZES):
        is_last = size == SIZES[-1]
        launch = runs.launch(name, "--async-save", num_ranks=size)
        if not is_last:
            step = runs.num_steps * (number + 1) // len(SIZES)
            rank, saved = rng.randrange(size), runs.saved(name)
            launch.wait_until(lambda new, rank=rank, step=step, saved=saved: runs.saved(name) > saved and any(
                mark.rank == rank and mark.phase == marks.STEP and mark.number >= step for mark in new))
            kill(next(mark.pid for mark in launch.marks.all if mark.rank == rank), signal.SIGKILL)
        ending = launch.end()
        if is_last and ending.status:
            problems.append(f"{size} ranks: status {ending.status}:\n{ending.said[-3000:]}")
        changes.append(min((mark.number for mark in launch.marks.all if mark.phase == marks.STEP), default=0))
        samples |= samples_of(launch.marks.all)
    ours, theirs = ([row for row in json_lines(runs.folder(one) / "logs" / "metrics.jsonl") if row["kind"] == "step"]
                    for one in (name, "whole"))
    exact = [[[row[key] for key in EXACT] for row in of_run] for of_run in (ours, theirs)]
    problems += [] if exact[0] == exact[1] and len(ours) == runs.num_steps else ["other steps, samples or tokens"]
    problems += [] if samples == samples_of(whole) else ["other samples in a step"]
    found = {key: [abs(row[key] - other[key]) / abs(other[key]) for row, other in zip(ours, theirs, strict=True)]
             for key in ("loss", "grad_norm")}
    problems += [] if max(found["loss"]) <= CLOSE else [f"losses differ by {max(found['loss'])}"]
    problems += [] if not any(found["loss"][: changes[1] - 1]) else ["other losses before the first change"]
    return {"sizes": SIZES, "first_steps": changes, "steps": len(ours), "problems": problems,
            "largest_differences": {key: max(one) for key, one in found.items()},
            "steps_with_equal_losses": found["loss"].count(0)}  # fmt: skip
