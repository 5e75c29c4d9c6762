"""Lock files: one run at a time per directory, and one process that builds an index while others wait.

A lock file names its owner: a process, its host and start time.  The owner sets the file's modification time every
``BEAT_SECONDS``, and removes the file at the end.  A disk that several hosts share, such as NFS, Lustre or GPFS, need
only let exactly one process create a file; the system's file locks do not work across hosts on all of them.

An owner on this kernel is looked up in the process table.  One on another host counts as dead if the file has not
changed for ``SILENT_SECONDS`` by the clock of the process that waits, because clocks of two hosts may differ.
"""

import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from mm.errors import UserError, refuse, writing
from mm.files import json_object, regular
from mm.process import began, node_id

LOCK_FILE = ".mm-train.lock"
BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""Six beats: one may take some seconds on a shared disk, and a restart on another host waits this long at most."""
_LOOK_SECONDS = 0.5
_NOTE_SECONDS = 10.0
"""When to print that a process waits for an index; then again each time that it has waited four times as long."""


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock, as stated in the lock file."""

    host: str
    pid: int
    kernel: str
    """The kernel, and the process namespace in it, that ``pid`` belongs to: containers have their own namespaces."""
    started: str
    """When the process started, in ticks of that kernel, because process ids are reused."""
    since: str
    """Local time, for people."""

    @classmethod
    def here(cls) -> "Owner":
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, node_id(), began(pid) or "", f"{datetime.now():%Y-%m-%d %H:%M:%S}")

    @classmethod
    def read(cls, content: bytes) -> "Owner | None":
        """The owner in a lock file's ``content``; None if it is not written yet."""
        try:
            found = cls(**json_object(content)["owner"])
        except (ValueError, KeyError, TypeError):
            return None
        return found if type(found.pid) is int and 0 < found.pid < 1 << 31 else None

    def is_alive(self) -> bool | None:
        """Whether the process still runs; None if it runs under another kernel."""
        if self.kernel != node_id():
            return None
        found = began(self.pid)
        if found is None:
            try:
                os.kill(self.pid, 0)
            except PermissionError:  # another user's process, which /proc may hide
                return True
            except ProcessLookupError:
                return False
        return found == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lock:
    """This process's lock file, which a thread renews."""

    def __init__(self, path: Path) -> None:
        self.path, self._content = path, json.dumps({"owner": asdict(Owner.here())}).encode() + b"\n"
        self._is_created = False
        self._has_ended = threading.Event()
        self._changing = threading.Lock()
        """Held while the file is created or removed: another thread may end the run meanwhile."""

    def attempts(self) -> Iterator[tuple[Owner | None, bool]]:
        """Try until the lock is taken or ``release`` has been called.  A dead owner's file is removed.

        While another process holds it, yields that owner (None: unknown) and whether it is certainly alive.  Raises
        OSError if the file cannot be created or read.
        """
        last, changed, has_changed = None, 0.0, False
        while not (self._has_ended.is_set() or self._create()):
            found, now = _look(self.path), time.monotonic()
            if found != last:
                last, changed, has_changed = found, now, last is not None
            if found is not None:
                owner = Owner.read(found[0])
                is_alive = None if owner is None else owner.is_alive()
                if is_alive is False or (is_alive is None and now - changed > SILENT_SECONDS):
                    _remove(self.path, found)
                    continue
                yield owner, is_alive or has_changed
            time.sleep(_LOOK_SECONDS)

    def _create(self) -> bool:
        with self._changing:
            if self._has_ended.is_set():
                return False
            try:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                return False
            try:
                os.write(file, self._content)
                os.fsync(file)
            except OSError:  # a full disk: the next run would wait for the owner of an empty file
                os.close(file)
                self.path.unlink()
                raise
            self._is_created = True
        threading.Thread(target=self._renew, args=[file], name="lock", daemon=True).start()
        return True

    def _renew(self, file: int) -> None:
        while not self._has_ended.wait(BEAT_SECONDS):
            with suppress(OSError):  # one missed beat; if the lock is lost because of it, ``is_lost`` finds that
                os.utime(file)
        os.close(file)

    def is_lost(self) -> bool:
        """Whether the file was removed or is another's, because this process was suspended for too long, say."""
        found = _look(self.path)
        return found is None or found[0] != self._content

    def release(self) -> None:
        """Remove the file if it is this process's; may be called again, and returns when it is removed."""
        with self._changing:
            if not self._has_ended.is_set():
                self._has_ended.set()
                with suppress(OSError):
                    if self._is_created and not self.is_lost():
                        self.path.unlink()


class Claim(AbstractContextManager["Claim"]):
    """The directories that a run has locked; none on most ranks."""

    def __init__(self) -> None:
        self._locks: tuple[tuple[Lock, str], ...] = ()
        self._has_ended = False

    def add(self, directories: Mapping[str, str], say: Callable[[str], None]) -> None:
        """Lock the directories that these flags gave, creating missing ones; ``say`` reports a wait.

        Raises UserError, and releases all directories, if another run holds one of them, or it cannot be written.
        """
        files: dict[Path, str] = {}  # of two flags with one directory, the first
        for flag, directory in directories.items():
            files.setdefault(Path(directory).resolve() / LOCK_FILE, f"{flag} {directory}")
        try:
            for path, flag in files.items():
                with writing(path, flag):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    lock = Lock(path)
                    self._locks = (*self._locks, (lock, flag))  # first, so that it is released if the run ends
                    if self._has_ended:  # just before, in another thread
                        lock.release()
                    for number, (owner, is_alive) in enumerate(lock.attempts()):
                        if is_alive:
                            raise UserError(
                                f"{flag} is being written by another run, {owner or 'which has just begun'} ({path}); "
                                f"wait until it ends, or give another directory")
                        if number == 0:
                            say(f"note: {flag} is claimed by {owner or 'a run'}; this run takes it over if {path} is "
                                f"not renewed within {SILENT_SECONDS:.0f} s")
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raise UserError if any lock is lost."""
        refuse(f"{flag}: {lock.path} no longer belongs to this run: it was not renewed for {SILENT_SECONDS:.0f} s, or "
               f"was removed, so another run may be writing there; this run stops writing"
               for lock, flag in self._locks if lock.is_lost())

    def release(self) -> None:
        """Release the directories, and lock no more: another thread may end the run while the main thread locks one."""
        self._has_ended = True
        for lock, _ in self._locks:
            lock.release()

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def making(path: Path, what: str) -> Iterator[None]:
    """Hold the lock ``path`` while ``what`` is created; waits for another process that creates it, and says so.

    The holder must check whether another process has created it.  Raises OSError if the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock, start, due = Lock(path), time.monotonic(), _NOTE_SECONDS
    for owner, _ in lock.attempts():
        waited = time.monotonic() - start
        if waited > due:
            due *= 4
            sys.stderr.write(f"note: waiting for {owner or 'another process'}, which creates {what}: {waited:.0f} s so "
                             f"far\n")
    try:
        yield
    finally:
        lock.release()


def _look(path: Path) -> tuple[bytes, int] | None:
    """Content and modification time of the file; None if there is none.

    Opens the file each time, so that a shared disk asks its server.  Raises OSError for anything but a regular file.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: regular(name, flags | os.O_NOFOLLOW)) as stream:
            return stream.read(), os.fstat(stream.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _remove(path: Path, left: tuple[bytes, int]) -> None:
    """Remove the lock file if it is still ``left``, not one that another process has created meanwhile.

    A file lock lets one process at a time compare and remove.  If the disk has no locks across hosts, ``is_lost`` finds
    that two hosts did so at once.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # the disk has no locks at all, or the file is another user's
            fcntl.flock(stack.enter_context(open(path, "r+b", opener=regular)), fcntl.LOCK_EX)
        if _look(path) == left:
            path.unlink(missing_ok=True)
