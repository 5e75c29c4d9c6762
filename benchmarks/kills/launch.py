"""One launch with marks: start it, wait for a phase, send a signal, and see how it ends."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.job import MARK, Job, marked_processes
from benchmarks.kills.marks import FIFO, Mark, Marks
from mm.process import began
from tests.launch import warm_python

LEFT_SECONDS = 30.0
"""A process that is alive this long after the launcher has ended is left."""
LONGEST_SECONDS = 400.0
"""After which a launch that does not end is killed, and counted as stuck."""


class Starter:
    """How the launches of this process start: in forks of one process that has imported everything, which takes a
    tenth of the time, or as new Python processes."""

    def __init__(self, is_fresh: bool) -> None:
        os.environ[MARK] = self.mark = f"kills-{os.getpid()}"
        os.environ["OMP_NUM_THREADS"] = "1"  # of the forks
        self.python = sys.executable if is_fresh else str(warm_python())
        # Forks keep the environment that the warm process began with, so the mark is this process's.
        self.own = {os.getpid()}
        until = time.monotonic() + 60
        while not is_fresh and len(self.own) == 1 and time.monotonic() < until:
            self.own |= {one.pid for one in psutil.Process().children() if "tests.forked" in " ".join(one.cmdline())}


@dataclass(frozen=True)
class Ending:
    """How a launch ended."""

    seconds: float
    """From the signal (or the call) to the end of the last process."""
    status: int
    left: tuple[str, ...]
    """The command lines of processes that did not end by themselves."""
    said: str
    """What the launch wrote."""


class Launch:
    """One launch of ``worker``; its marks are read while this process waits for it."""

    def __init__(
        self, starter: Starter, words: Sequence[str], num_ranks: int, folder: Path, launcher_words: Sequence[str] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.marks, self._starter, self._output = Marks(folder), starter, folder / "output"
        self._began_at = self._output.stat().st_size if self._output.exists() else 0
        os.environ[FIFO] = str(self.marks.path)
        self.job = Job(words, num_ranks, self._output, "benchmarks.kills.worker", starter.python, launcher_words)
        self.num_ranks = num_ranks

    def is_running(self) -> bool:
        return self.job.launcher.poll() is None

    def processes(self) -> list[psutil.Process]:
        """All processes of this launch that are alive."""
        forks = [one for one in marked_processes(self._starter.mark) if one.pid not in self._starter.own]
        return [*forks, *self.job.processes()]

    def wait_until(self, is_time: Callable[[list[Mark]], bool]) -> bool:
        """Read marks until ``is_time`` of the newest; False if the launch ends before."""
        while self.is_running():
            found = self.marks.read(0.1)
            if found and is_time(found):
                return True
        return False

    def wait_for(self, rank: int, phase: str, nth: int, seconds: float) -> int | None:
        """Wait for the ``nth`` time that this rank is in the phase, and until it has been there for ``seconds``.

        Returns the rank's process id; None if the launch ends before.  If the phase ends sooner, the next time counts.
        """
        count, until, pid = 0, None, 0
        while self.is_running():
            if until is not None and (left := until - time.monotonic()) <= 0:
                return pid
            for mark in self.marks.read(0.1 if until is None else min(0.1, left)):
                if mark.rank == rank and mark.phase == phase:
                    count += mark.begins
                    until = mark.seconds + seconds if mark.begins and count >= nth else None
                    pid = mark.pid
        return None

    def end(self) -> Ending:
        """Wait until all processes have ended; kills those that do not."""
        began, ended, stuck = time.monotonic(), None, ()
        while True:
            self.marks.read(0.05)
            now = time.monotonic()
            if now > began + LONGEST_SECONDS and not stuck:
                stuck = tuple(self.processes())
                for one in stuck:
                    kill(one.pid, signal.SIGKILL)
            if self.is_running():
                continue
            ended = ended or now
            left = self.processes()
            if not left or now > ended + LEFT_SECONDS:
                break
        seconds = time.monotonic() - began
        names = tuple(named(one) for one in (*stuck, *left))
        for one in left:
            kill(one.pid, signal.SIGKILL)
        while self.marks.read(0):
            pass
        self.marks.close()
        with self._output.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._began_at)
            said = file.read()
        return Ending(seconds, self.job.launcher.wait(), names, said)


def named(process: psutil.Process) -> str:
    """A process and what it runs."""
    with suppress(psutil.NoSuchProcess):
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:200]}"
    return f"{process.pid} has ended"


def kill(pid: int, number: int) -> bool:
    """Send a signal; False if the process has ended."""
    try:
        if began(pid) is None:
            return False
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
