"""Reads damaged files in children of this process, one batch in each, and reports what a command must not do.

A child that hangs, crashes or takes too much memory is ended; the next child continues with the next mutation.
"""

import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.fuzz.kind import Kind, Reading
from mm.errors import UserError, file_error

MOST_SECONDS = 10.0
"""Seconds of a processor for one mutation."""
LATEST_SECONDS = 30.0
"""By the clock, for a reader that sleeps: it waits for something that never comes."""
MOST_BYTES = 1 << 30
"""Memory that the reader may take for one mutation, besides the processes with their own limits."""
_ROOM_BYTES = 8 << 30
"""Address space of a child: it fails before the machine has no memory left."""
_BATCH = 250


@dataclass
class Found:
    """The outcome of one kind's mutations."""

    accepted: int = 0
    refused: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)
    most_seconds: float = 0.0
    most_bytes: int = 0

    @property
    def count(self) -> int:
        return self.accepted + self.refused + len(self.findings)

    def add(self, one: dict[str, Any]) -> None:
        match one["outcome"]:
            case "accepted":
                self.accepted += 1
            case "refused":
                self.refused += 1
            case _:
                self.findings.append(one)
        self.most_seconds = max(self.most_seconds, one["seconds"])
        self.most_bytes = max(self.most_bytes, one["bytes"])


class Place:
    """The directories of one kind; see ``Kind``."""

    def __init__(self, root: Path) -> None:
        """``root`` does not exist yet."""
        self.root = root
        self.original, self.target, self.beside = root / "original", root / "target", root / "beside"
        self.tmp, self.home, self.log, self.damage = root / "tmp", root / "home", root / "log", root / "damage"
        for folder in (self.original, self.target, self.beside, root / "outside", self.tmp, self.home):
            folder.mkdir(parents=True)
        (root / "outside" / "file").write_text("untouched")

    def state(self) -> dict[str, tuple[int, int, int]]:
        """All files that a reader of ``target`` must not change: kind, size and time of each."""
        found: dict[str, tuple[int, int, int]] = {}
        left = [self.root]
        while left:
            folder = left.pop()
            for one in os.scandir(folder):
                if folder == self.root and one.name in ("target", "tmp", "log", "damage"):
                    continue
                status = one.stat(follow_symlinks=False)
                found[one.path] = (status.st_mode, status.st_size, status.st_mtime_ns)
                if one.is_dir(follow_symlinks=False):
                    left.append(Path(one.path))
        return found


def run(kind: Kind, root: Path, numbers: range, seed: int) -> Found:
    """Damage and read files of ``kind`` in the empty directory ``root``, once for each of ``numbers``."""
    place = Place(root)
    os.environ |= {"HOME": str(place.home), "XDG_CACHE_HOME": str(place.home), "TMPDIR": str(place.tmp)}
    os.chdir(place.original)
    reading = kind.write(place.original, place.beside)
    found = Found()
    for one in _outcomes(kind, reading, place, range(-1, 0), seed):  # what nobody has damaged must be accepted
        if one["outcome"] != "accepted":
            raise SystemExit(f"{kind.name}: the valid files are not accepted: {one['detail']}")
    for one in _outcomes(kind, reading, place, numbers, seed):
        found.add(one)
    return found


def _outcomes(kind: Kind, reading: Reading, place: Place, numbers: range, seed: int) -> Iterator[dict[str, Any]]:
    left = numbers
    while left:
        batch, begun = left[:_BATCH], 0
        for one in _batch(kind, reading, place, batch, seed):
            begun += 1
            yield one
        left = left[begun:]


def _batch(kind: Kind, reading: Reading, place: Place, numbers: range, seed: int) -> Iterator[dict[str, Any]]:
    """The outcomes of ``numbers`` from one child, up to the one that ends it."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.close(reader)
        _work(kind, reading, place, numbers, seed, os.fdopen(writer, "w", buffering=1))
    os.close(writer)
    with os.fdopen(reader) as lines:
        for number in numbers:
            outcome = _outcome(lines, child)
            if outcome is not None:
                yield outcome
                continue
            status = _end(child)
            damage = place.damage.read_text(errors="replace")
            why = "hang" if status == -signal.SIGKILL else f"ended with {status}"
            detail = place.log.read_text(errors="replace")[-4000:]
            yield {"number": number, "outcome": why, "damage": damage, "detail": detail, "seconds": 0.0, "bytes": 0}
            return
    _end(child)


def _outcome(lines: IO[str], child: int) -> dict[str, Any] | None:
    """The next outcome; None if the child has ended or hangs."""
    began, cpu = time.monotonic(), _used(child)[0]
    while not select.select([lines], [], [], 1.0)[0]:
        seconds, sleeps = _used(child)
        if seconds - cpu > MOST_SECONDS or (sleeps and time.monotonic() - began > LATEST_SECONDS):
            os.killpg(child, signal.SIGKILL)
            return None
    line = lines.readline()
    return json.loads(line) if line else None


def _used(child: int) -> tuple[float, bool]:
    """Seconds of a processor that a child and its processes have used, and whether all of them sleep."""
    with suppress(psutil.Error):
        process = psutil.Process(child)
        all_of_them = (process, *process.children(recursive=True))
        times = [one.cpu_times() for one in all_of_them]
        seconds = sum(one.user + one.system for one in times) + times[0].children_user + times[0].children_system
        return seconds, all(one.status() == psutil.STATUS_SLEEPING for one in all_of_them)
    return 0.0, False


def _end(child: int) -> int:
    """Wait for a child, and end the processes that it has started; returns its status."""
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def _work(kind: Kind, reading: Reading, place: Place, numbers: range, seed: int, outcomes: IO[str]) -> None:
    """The child: damage, read, report."""
    status = 1
    try:
        os.setsid()
        log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
        size = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (size + _ROOM_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in numbers:
            kind.copy(place.original, place.target)
            os.chdir(place.target)
            damage = kind.damage(place.target, number, seed) if number >= 0 else "none"
            place.damage.write_text(damage)
            before = place.state()
            outcome = _read(kind, reading, place)
            after = place.state()
            if before != after:
                changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
                outcome |= {"outcome": "write outside of the target", "detail": ", ".join(changed)}
            outcomes.write(json.dumps({"number": number, "damage": damage, **outcome}) + "\n")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _read(kind: Kind, reading: Reading, place: Place) -> dict[str, Any]:
    """What reading leads to."""
    names = {*kind.words, *(path.name for path in place.original.rglob("*"))}
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before, began = _memory("VmRSS"), time.perf_counter()
    outcome, detail = "accepted", ""
    try:
        reading()
    except UserError as error:
        outcome, detail = "refused", "\n".join(error.problems)
    except OSError as error:
        problem = file_error(error)
        outcome, detail = ("refused", str(problem)) if problem is not None else ("traceback", traceback.format_exc())
    except SystemExit as end:  # as argparse ends a command
        outcome, detail = ("accepted", "") if not end.code else ("refused", str(end.code))
    except Exception:
        outcome, detail = "traceback", "\n".join(line[:300] for line in traceback.format_exc().splitlines()[-40:])
    seconds, taken = time.perf_counter() - began, max(0, _memory("VmHWM") - before)
    if outcome == "refused" and not detail.strip():
        outcome, detail = "empty message", ""
    elif outcome == "refused" and kind.words and not any(name in detail for name in names):
        outcome = "message without the file"
    elif taken > MOST_BYTES:
        outcome, detail = "memory", f"{taken:,} bytes"
    return {"outcome": outcome, "detail": detail if outcome not in ("accepted", "refused") else detail[:300],
            "seconds": seconds, "bytes": taken}


def _memory(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10
