"""Decides which of several processes creates a file that they all need: one process on one node; the others wait.

A lock is a file beside the target, created by the first process and touched regularly while that process works.  The
only requirement on a shared file system is that exactly one process can create a file of a given name.  A lock whose
owner has died is taken over: immediately on its own node, and on others after ``_STALE_SECONDS`` by the waiting
process's clock.  If that goes wrong (an owner continues after being suspended for so long), the file is created twice,
which only costs time.
"""

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from mm.files import json_object
from mm.parallel.node import began, node_id

_BEAT_SECONDS = 5.0
_STALE_SECONDS = 60.0
_POLL_SECONDS = 0.5
_NOTE_SECONDS = (10.0, 60.0, 300.0)
"""When to print that a process is waiting; repeated at the last interval."""


@contextmanager
def making(path: Path, what: str) -> Iterator[None]:
    """Hold the lock ``path`` while ``what`` is created.  The holder must check whether another process already did.

    Raises OSError if the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    own = json.dumps({"node": node_id("pid"), "pid": os.getpid(), "began": began(os.getpid()),
                      "host": socket.gethostname(), "token": secrets.token_hex(16)})
    while not _taken(path, own):
        _wait(path, what)
    done = Event()
    beat = Thread(target=_beat, args=(path, done), name="lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        done.set()
        beat.join()
        if _text(path) == own:  # otherwise another process has taken it over
            path.unlink(missing_ok=True)


def _taken(path: Path, own: str) -> bool:
    """Create the lock, unless it exists."""
    try:
        with path.open("x") as stream:
            stream.write(own)
    except FileExistsError:
        return False
    return True


def _wait(path: Path, what: str) -> None:
    """Wait until the lock or its owner is gone."""
    start = changed = time.monotonic()
    num_notes, last = 0, None
    while (content := _text(path)) is not None:
        seen = (content, _changed(path))
        if seen != last:
            last, changed = seen, time.monotonic()
        holder = _json(content)
        if _is_dead(holder) or time.monotonic() - changed > _STALE_SECONDS:
            _take_away(path, content)
            return
        waited = time.monotonic() - start
        step = _NOTE_SECONDS[-1]
        num_intervals = len(_NOTE_SECONDS)
        due = _NOTE_SECONDS[num_notes] if num_notes < num_intervals else step * (num_notes - num_intervals + 2)
        if waited > due:
            num_notes += 1
            maker = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "another user's process"
            sys.stderr.write(f"note: waiting for {maker}, which creates {what}: {waited:.0f} s so far\n")
        time.sleep(_POLL_SECONDS)


def _take_away(path: Path, content: str) -> None:
    """Remove the lock of a dead owner; if several processes try, only one succeeds."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with suppress(FileNotFoundError):  # another process was faster
        path.rename(beside)
        found = _text(beside)
        beside.unlink()
        if found is not None and found != content:  # the lock of a new owner, created in the meantime
            _taken(path, found)


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the owner is known to have ended: only for processes of this node."""
    return holder.get("node") == node_id("pid") and began(holder.get("pid", -1)) != holder.get("began")


def _beat(path: Path, done: Event) -> None:
    while not done.wait(_BEAT_SECONDS):
        with suppress(OSError):
            os.utime(path)


def _changed(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _text(path: Path) -> str | None:
    """The content of a lock; None if there is none, "" if this process may not read it, as another user's."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except OSError:
        return ""


def _json(content: str) -> dict[str, Any]:
    try:
        return json_object(content)
    except ValueError:
        return {}
