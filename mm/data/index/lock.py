"""Who makes a file that several processes need: one of them, on one node; the others wait.

A lock is a file beside, made by whoever comes first, whose time of change goes on while its maker works.  It needs
nothing of a shared file system but that one process can make a file of a name.  A lock whose maker has died is taken
over: at once on its own node, and on others after ``_STALE_SECONDS``, by the waiting process' own clock.  Where it goes
wrong (a maker that was stopped for so long goes on) the file is made twice, which costs time and nothing else.
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

import psutil

_BEAT_SECONDS = 5.0
_STALE_SECONDS = 60.0
_POLL_SECONDS = 0.5
_SAY_SECONDS = (10.0, 60.0, 300.0)
"""After how long a process says that it waits; then every time after the last."""


@contextmanager
def making(path: Path, what: str) -> Iterator[None]:
    """Hold the lock ``path`` while ``what`` is made.  Whoever holds it looks again: another may have made it meanwhile.

    Raises OSError where the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    own = json.dumps({"node": _node(), "pid": os.getpid(), "began": _began(os.getpid()),
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
        if _text(path) == own:  # else another process has taken it over
            path.unlink(missing_ok=True)


def _taken(path: Path, own: str) -> bool:
    """Make the lock, unless it is there."""
    try:
        with path.open("x") as stream:
            stream.write(own)
    except FileExistsError:
        return False
    return True


def _wait(path: Path, what: str) -> None:
    """Until the lock is gone, or its maker."""
    began = changed = time.monotonic()
    said, last = 0, None
    while (content := _text(path)) is not None:
        seen = (content, _changed(path))
        if seen != last:
            last, changed = seen, time.monotonic()
        holder = _json(content)
        if _is_dead(holder) or time.monotonic() - changed > _STALE_SECONDS:
            _take_away(path, content)
            return
        waited = time.monotonic() - began
        step = _SAY_SECONDS[-1]
        due = _SAY_SECONDS[said] if said < len(_SAY_SECONDS) else step * (said - len(_SAY_SECONDS) + 2)
        if waited > due:
            said += 1
            maker = f"process {holder.get('pid')} on {holder.get('host')}"
            sys.stderr.write(f"note: waiting for {maker}, which makes {what}: {waited:.0f} s so far\n")
        time.sleep(_POLL_SECONDS)


def _take_away(path: Path, content: str) -> None:
    """Remove the lock of a maker that has died; of several processes that see it, one."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with suppress(FileNotFoundError):  # another process was sooner
        path.rename(beside)
        found = _text(beside)
        beside.unlink()
        if found is not None and found != content:  # that of a new maker, which came in between
            _taken(path, found)


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the maker is known to have ended: a process of this node."""
    return holder.get("node") == _node() and _began(holder.get("pid", -1)) != holder.get("began")


def _began(pid: int) -> float | None:
    """When a process of this node began; None where there is none."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except (psutil.Error, ValueError):
        return None


def _node() -> str:
    """What processes share that see each other's process numbers; another for each process where unknown."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)


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
    try:
        return path.read_text()
    except OSError:
        return None


def _json(content: str) -> dict[str, Any]:
    try:
        return json.loads(content)
    except ValueError:
        return {}
