"""What disturbs a launch: signals, a disk that is full or slow, and a clock that jumps."""

import random
import re
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.job import Job
from benchmarks.soak.machine import ShiftedClock, SmallDisk
from benchmarks.soak.runs import Run

_MOST_LEFT_BYTES = 8 << 20
"""A full disk has less than this left: less than a checkpoint, so also a save that has begun fails."""


@dataclass(frozen=True)
class Launch:
    """A launch that runs, and what it runs on."""

    run: Run
    layout: str
    job: Job
    output: Path
    temporary: Path
    """Its folder for temporary files."""
    disk: SmallDisk
    clock: ShiftedClock
    rng: random.Random
    saved: int | None
    """The newest checkpoint when it began."""


@dataclass(frozen=True)
class Event:
    """One kind."""

    begin: Callable[[Launch], None]
    """After it, the launch must end."""
    after: Callable[[Launch, int], list[str]] = lambda launch, status: []
    """Undo it after the launch has ended with this status; problems."""
    is_kill: bool = False
    """Whether a process dies that could have removed its files."""


@dataclass
class Counted:
    """What happened to the launches that one kind of event disturbed."""

    seconds: list[float] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    num_left: int = 0
    files_left: set[str] = field(default_factory=set)

    def to_json(self) -> dict[str, Any]:
        statuses = {str(status): self.statuses.count(status) for status in sorted(set(self.statuses))}
        return {"count": len(self.seconds), "median_seconds": round(statistics.median(self.seconds), 2),
                "most_seconds": round(max(self.seconds), 2), "statuses": statuses, "processes_left": self.num_left,
                "temporary_files_left": sorted(self.files_left)}  # fmt: skip


def _to_launcher(number: int) -> Callable[[Launch], None]:
    return lambda launch: launch.job.launcher.send_signal(number)


def _to_one(choose: Callable[[Job], list[psutil.Process]], number: int) -> Callable[[Launch], None]:
    """Send the signal to one of the processes; to the launcher if there are none yet, or no longer.  SIGSTOP waits for
    one: nobody ends a launcher that is stopped."""
    def send(launch: Launch) -> None:
        chosen = sorted(choose(launch.job), key=lambda process: process.pid)
        while number == signal.SIGSTOP and not chosen and launch.job.launcher.poll() is None:
            time.sleep(0.01)
            chosen = sorted(choose(launch.job), key=lambda process: process.pid)
        with suppress(psutil.NoSuchProcess):  # it has just ended
            (launch.rng.choice(chosen) if chosen else launch.job.launcher).send_signal(number)

    return send


def _fill(launch: Launch) -> None:
    launch.disk.fill(launch.rng.choice((0, launch.rng.randrange(_MOST_LEFT_BYTES))))


def _make_room(launch: Launch, status: int) -> list[str]:
    """The run has ended with one message that names the directory, and the checkpoints before are as they were."""
    run, said = launch.run, launch.output.read_text()
    launch.disk.make_room()
    if status == 0:
        return []  # nothing was left to write
    name = f"{run.name} ({launch.layout}), full disk"
    errors = [line for line in said.splitlines() if re.match(r"(\[rank \d+\] )?error: ", line)]
    found = [] if status == 1 else [f"{name}: status {status}"]  # of the launcher; ranks end with 2
    if len(errors) != 1 or str(launch.disk.folder) not in errors[0] or not re.search(
            r"No space left on device|only [\d,]+ (are|is) free", errors[0]):
        found.append(f"{name}: the message is {errors or said[-2000:]}")
    latest = run.latest()
    if (latest or 0) < (launch.saved or 0) or (latest and not (run.save / f"iter_{latest:07d}/manifest.json").exists()):
        found.append(f"{name}: the newest checkpoint is {latest}, and was {launch.saved}")
    return found


def _slow(launch: Launch) -> None:
    """For a few seconds of training, and of the last save."""
    launch.disk.slow(True)
    _go_on(launch)


def _go_on(launch: Launch) -> None:
    """A few seconds, then the scheduler asks the launch to stop."""
    until = time.monotonic() + launch.rng.uniform(1, 6)
    while launch.job.launcher.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    with suppress(psutil.NoSuchProcess):  # it has ended by itself
        launch.job.launcher.send_signal(signal.SIGTERM)


def _fast_again(launch: Launch, status: int) -> list[str]:
    launch.disk.slow(False)
    return _stopped_by(signal.SIGTERM)(launch, status)


def _stopped_by(number: int) -> Callable[[Launch, int], list[str]]:
    def check(launch: Launch, status: int) -> list[str]:
        if status in (0, 128 + number, -number):  # the last one: before Python has started
            return []
        return [f"{launch.run.name} ({launch.layout}): {signal.Signals(number).name}: status {status}\n"
                f"{launch.output.read_text()[-6000:]}"]

    return check


def _jump(days: int) -> Callable[[Launch], None]:
    def jump(launch: Launch) -> None:
        launch.clock.jump(days)
        _go_on(launch)

    return jump


EVENTS: dict[str, Event] = {
    "SIGTERM to the launcher": Event(_to_launcher(signal.SIGTERM), _stopped_by(signal.SIGTERM)),
    "SIGUSR1 to the launcher": Event(_to_launcher(signal.SIGUSR1), _stopped_by(signal.SIGUSR1)),
    "SIGUSR1 to a rank": Event(_to_one(Job.ranks, signal.SIGUSR1), _stopped_by(signal.SIGUSR1)),
    "SIGKILL to a rank": Event(_to_one(Job.ranks, signal.SIGKILL), is_kill=True),
    "SIGKILL to the launcher": Event(_to_launcher(signal.SIGKILL), is_kill=True),
    "SIGKILL to a data worker": Event(_to_one(Job.workers, signal.SIGKILL), is_kill=True),
    "SIGSTOP to a rank": Event(_to_one(Job.ranks, signal.SIGSTOP), is_kill=True),
    "full disk": Event(_fill, _make_room),
    "slow disk, then SIGTERM": Event(_slow, _fast_again),
    "clock a day ahead, then SIGTERM": Event(_jump(1), _stopped_by(signal.SIGTERM)),
    "clock a day back, then SIGTERM": Event(_jump(-1), _stopped_by(signal.SIGTERM)),
}


def left_out(disk: SmallDisk, clock: ShiftedClock) -> dict[str, str]:
    """Events that this machine cannot have, and why."""
    reasons = {"full disk": disk.why_not, "slow disk": disk.why_not_slow, "clock": clock.why_not}
    return {event: why for event in EVENTS for start, why in reasons.items() if why and event.startswith(start)}
