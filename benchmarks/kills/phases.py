"""A random rank is killed or stopped in each phase of a launch, and the same command resumes.

A run is a chain: each launch but the last is disturbed in another phase.  At its end it must equal the undisturbed run.
"""

import random
import re
import signal
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.kills import marks
from benchmarks.kills.launch import Ending, kill
from benchmarks.kills.runs import Runs, clock

KILL_SECONDS = 5.0
"""A job whose rank is killed must end within this time."""
REST_SECONDS = 10.0
"""A job whose rank is stopped must end within the limit and this time."""
FEW = 4
"""So many launches of a run are disturbed, or one in each phase."""
EXPORTS = 3
"""Launches of a run that may be disturbed in the export."""
JOIN_LIMIT = 60.0
"""Seconds that a rank may take until it joins the others: --distributed-timeout-minutes 1."""


@dataclass(frozen=True)
class Event:
    """One launch that was disturbed."""

    layout: str
    phase: str
    """In which the signal arrived."""
    rank: int
    seconds: float
    """From the signal to the end of the last process."""
    limit: float
    """How long it may take."""
    named_by: str
    """Who names the right rank: "ranks", "launcher", or "" if nobody does."""
    status: int
    left: tuple[str, ...]
    resumed_at: int
    """The checkpoint that the launch should have resumed from."""
    first_step: int
    """The first step that it ran; 0 if it did not come so far."""


def disturbed(runs: Runs, name: str, phase: str, rng: random.Random, usual: float, number: int) -> Event | Ending:
    """Launch the run, and send the signal in this phase of a random rank; the launch's end if it ends before that."""
    is_stop, waits = number == signal.SIGSTOP, phase == marks.SAVE
    saved = runs.saved(name)
    if phase == marks.EXPORT:
        runs.delete_export(name)
    launch = runs.launch(name, *(() if waits else ("--async-save",)))  # a save without it is all in one phase
    rank = rng.randrange(launch.num_ranks)
    # A process's first step has a limit of 30 minutes.
    nth = rng.randint(3, 5) if is_stop and phase in (marks.STEP, marks.DATA) else rng.randint(1, 3)
    if phase in (marks.START, marks.LOAD, marks.EXPORT):
        nth = 1
    if phase == marks.START and not is_stop and rng.random() < 0.5:
        phase = marks.JOIN
    pid = launch.wait_for(rank, phase, nth, rng.uniform(0, usual))
    if pid is None or not kill(pid, number):
        return launch.end()
    ending = launch.end()
    found = launch.marks.open_at(rank)
    limit = KILL_SECONDS if not is_stop else REST_SECONDS + (JOIN_LIMIT if marks.JOIN in found else runs.limit)
    print(f"{clock()} {runs.layout}: {signal.Signals(number).name} to rank {rank}, aimed at {phase}, met in "
          f"{sorted(found)}: status {ending.status}, {ending.seconds:.1f} s", file=sys.stderr, flush=True)
    first_step = next((one.number for one in launch.marks.all if one.phase == marks.STEP), 0)
    met = phase if phase in found else next((one for one in sorted(found)), "between")
    return Event(runs.layout, marks.START if met == marks.JOIN else met, rank, round(ending.seconds, 2), limit,
                 named_by(ending.said, rank, is_stop), ending.status, ending.left, saved, first_step)


def named_by(said: str, rank: int, is_stop: bool) -> str:
    """Who names this rank as the cause."""
    if is_stop:
        text = rf"rank {rank}, last known: .*does not answer"  # mm.launch has torchrun's store, so also for rank 0
        others = re.findall(r"rank (\d+), last known: .*does not answer", said)
        return "ranks" if re.search(text, said) and set(others) <= {str(rank)} else ""
    died = re.findall(r"^error: rank (\d+) died", said, re.MULTILINE)
    if died:
        return "ranks" if set(died) == {str(rank)} else ""
    return "launcher" if re.search(rf"rank\s+: {rank} \(local_rank: {rank}\)\s+exitcode\s+: -9", said) else ""


def measure(
    runs: Runs, phases: Sequence[str], times: int, number: int, seed: int, note: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:  # fmt: skip
    """Disturb each phase ``times`` times; ``note`` gets the result so far after each run."""
    rng, whole = random.Random(seed), runs.undisturbed()
    usual = {phase: statistics.median(seconds) for phase in (*phases, marks.JOIN)
             if (seconds := marks.seconds_of(whole, phase))}
    print(f"{clock()} {runs.layout}: usual seconds "
          f"{ {phase: round(one, 3) for phase, one in usual.items()} }", file=sys.stderr, flush=True)
    left = Counter(dict.fromkeys(phases, times))
    events: list[Event] = []
    problems: list[str] = []
    result: dict[str, Any] = {}
    num_missed = num_runs = 0
    while +left:
        num_runs += 1
        name = f"{signal.Signals(number).name} {num_runs}"
        for phase in targets(left, rng):
            if left[phase] <= 0:
                continue
            if phase != marks.EXPORT and runs.saved(name) == runs.num_steps:
                continue  # a launch came to its end before the signal
            found = disturbed(runs, name, phase, rng, usual[phase], number)
            if isinstance(found, Event):
                events.append(found)
                left[found.phase] -= 1
                problems += problems_of(found)
                continue
            num_missed += 1
            usual[phase] /= 2  # it takes less than it took
            problems += [f"{name}: a launch ended with {found.status}:\n{found.said[-3000:]}"] if found.status else []
        ending = runs.launch(name, "--async-save").end()
        if ending.status or ending.left:
            problems.append(f"{name}: the last launch ended with {ending.status}, {len(ending.left)} left:\n"
                            f"{ending.said[-3000:]}")
        problems += runs.differences(name)
        result = {"runs": num_runs, "missed": num_missed, "events": table_of(events), "problems": problems,
                  "each": [asdict(one) for one in events]}  # fmt: skip
        note(result)
        if not problems:
            runs.delete(name)
    return result


def targets(left: Counter[str], rng: random.Random) -> Iterator[str]:
    """The phases of one run, in random order; the export comes last, because nothing is left to train after it."""
    wanted = [phase for phase, count in left.items() if count > 0 and phase != marks.EXPORT]
    for _ in range(max(1, FEW // max(1, len(wanted)))):
        yield from rng.sample(wanted, len(wanted))
    for _ in range(min(left[marks.EXPORT], EXPORTS)):
        yield marks.EXPORT


def problems_of(event: Event) -> list[str]:
    """What must not be."""
    where = f"{event.layout}, rank {event.rank} in {event.phase}"
    found = [f"{where}: {event.seconds} s, more than {event.limit}"] if event.seconds > event.limit else []
    found += [f"{where}: {event.left} left"] if event.left else []
    if event.first_step not in (0, event.resumed_at + 1):
        found.append(f"{where}: resumed at step {event.first_step}, not after {event.resumed_at}")
    return found + ([] if event.named_by else [f"{where}: nobody names the rank"])


def table_of(events: Sequence[Event]) -> dict[str, Any]:
    """The events of each phase."""
    by_phase: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_phase[event.phase].append(event)
    return {phase: {
        "count": len(found), "median_seconds": round(statistics.median(one.seconds for one in found), 2),
        "most_seconds": max(one.seconds for one in found), "left": sum(len(one.left) for one in found),
        "named_by": Counter(one.named_by for one in found), "statuses": Counter(str(one.status) for one in found),
    } for phase, found in by_phase.items()}  # fmt: skip
