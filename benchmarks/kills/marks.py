"""What ranks report to the driver: one line as each phase begins and ends, through a FIFO."""

import json
import os
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

FIFO = "MM_KILLS_MARKS"
"""Environment variable with the path of the FIFO."""
JOIN, START, LOAD, OPEN, DATA, STEP = "join", "start", "load", "open data", "data broadcast", "step"
SAVE, BACKGROUND, VALIDATION, EXPORT, SIGNAL = "save", "background save", "validation", "export", "signal"


@dataclass(frozen=True)
class Mark:
    """A phase of one rank begins or ends."""

    rank: int
    pid: int
    attempt: int
    """How often the launcher had restarted the ranks."""
    seconds: float
    """``time.monotonic``, which all processes of a machine share."""
    phase: str
    begins: bool
    number: int = 0
    """The iteration of a step, the number of a signal."""
    samples: tuple[tuple[int, ...], ...] = ()
    """At the end of a step: the samples of each microbatch."""


class Marker:
    """Writes the marks of this rank.  A line is one write, which any thread may make."""

    def __init__(self) -> None:
        self._file = os.open(os.environ[FIFO], os.O_WRONLY)
        self._of = int(os.environ["RANK"]), os.getpid(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def write(self, phase: str, begins: bool, number: int = 0, samples: tuple[tuple[int, ...], ...] = ()) -> None:
        mark = Mark(*self._of, time.monotonic(), phase, begins, number, samples)
        os.write(self._file, json.dumps(astuple(mark)).encode() + b"\n")

    @contextmanager
    def during(self, phase: str, number: int = 0) -> Iterator[None]:
        """Mark a phase; one that ends by an error stays open."""
        self.write(phase, True, number)
        yield
        self.write(phase, False, number)


class Marks:
    """The marks of one launch, for the driver."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"marks-{time.monotonic_ns()}"
        os.mkfifo(self.path, 0o600)
        self._file = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)  # with a writer of its own, it never ends
        self._half = b""
        self.all: list[Mark] = []

    def read(self, seconds: float) -> list[Mark]:
        """The marks that have arrived, after a wait of at most ``seconds`` for the first."""
        if not select.select([self._file], [], [], max(0.0, seconds))[0]:
            return []
        *lines, self._half = (self._half + os.read(self._file, 1 << 16)).split(b"\n")
        found = [Mark(*json.loads(line)) for line in lines]
        self.all += found
        return found

    def close(self) -> None:
        os.close(self._file)
        self.path.unlink()

    def open_at(self, rank: int) -> set[str]:
        """The phases in which this rank was last seen, in its latest attempt."""
        found: set[str] = set()
        own = [mark for mark in self.all if mark.rank == rank]
        for mark in own:
            if mark.attempt == own[-1].attempt:
                (found.add if mark.begins else found.discard)(mark.phase)
        return found


def seconds_of(found: Sequence[Mark], phase: str) -> list[float]:
    """How long this phase took, each time and on each rank."""
    began: dict[int, float] = {}
    seconds = []
    for mark in (one for one in found if one.phase == phase):
        if mark.begins:
            began[mark.rank] = mark.seconds
        elif mark.rank in began:
            seconds.append(mark.seconds - began.pop(mark.rank))
    return seconds
