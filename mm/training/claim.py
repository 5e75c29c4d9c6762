"""One run at a time per directory: a lock file in it names the process that writes there, its host and start time.

Rank 0 holds the lock for all ranks, or with ``--save-on-each-node`` the first rank of each disk, and removes it when
the run ends.  A run that finds a lock file checks whether its owner is still alive.  On the same kernel it looks up the
process.  On another host it watches the file: the owner renews it every ``BEAT_SECONDS``, and after ``SILENT_SECONDS``
without renewal the owner counts as dead.  The time in the file is not used, because clocks of two hosts may differ by
any amount.

The directory may be on any disk with exclusive file creation, such as NFS, Lustre and GPFS; the operating system's
locks do not work across hosts on all of them.
"""

import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from typing_extensions import Self

from mm.errors import UserError, collected, refuse, writing
from mm.files import json_object
from mm.parallel.node import began, node_id

LOCK_FILE = ".mm-train.lock"
BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""Six beats: one may take some seconds on a shared disk, and a restart on another host waits this long at most."""
_RELEASE_SECONDS = 5.0
"""How long the end of a run waits for an unresponsive disk."""


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock, as stated in the lock file."""

    token: str
    """A unique random id."""
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
        return cls(secrets.token_hex(8), socket.gethostname(), pid, node_id("pid"), began(pid) or "",
                   f"{datetime.now():%Y-%m-%d %H:%M:%S}")

    @classmethod
    def read(cls, content: bytes) -> "Owner | None":
        """The owner in a lock file's ``content``; None if it is not written yet, or damaged."""
        try:
            found = cls(**json_object(content)["owner"])
        except (ValueError, KeyError, TypeError):
            return None
        is_pid = type(found.pid) is int and 0 < found.pid < 2**31
        return found if is_pid and all(isinstance(one, str) for one in (found.kernel, found.started)) else None

    def is_here(self) -> bool:
        """Whether it is a process of this kernel, so that ``is_alive`` can look it up."""
        return self.kernel == node_id("pid")

    def is_alive(self) -> bool:
        """Whether the process still runs; only for a process that ``is_here``."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's process, which /proc may hide
            return began(self.pid) in (None, self.started)
        return began(self.pid) == self.started

    def content(self) -> bytes:
        """The lock file's content now, always of the same length, so that renewing is a single write."""
        return json.dumps({"owner": asdict(self), "renewed": f"{time.time():.1f}"}).encode() + b"\n"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lock:
    """This process's lock on one directory, which a thread renews."""

    def __init__(self, path: Path, flag: str) -> None:
        """For the lock file at ``path`` in the directory that ``flag`` gave."""
        self.path, self._flag, self._owner = path, flag, Owner.here()
        self._file: int | None = None
        self._has_ended = threading.Event()
        self._changing = threading.Lock()
        """Held while the file is created or removed: another thread may end the run meanwhile."""

    def acquire(self, say: Callable[[str], None]) -> None:
        """Create the lock file as soon as the directory is free, unless the run has ended; ``say`` reports a wait.

        Raises UserError if another process holds it.
        """
        while self._file is None and not self._has_ended.is_set():
            left = _left(self.path, self._flag, say)
            if left is not None:
                _remove(self.path, left)
            with suppress(FileExistsError), self._changing:  # another process was faster: try again
                if not self._has_ended.is_set():
                    self._file = self._created()
        if self._file is not None:
            threading.Thread(target=self._renew, args=[self._file], name="lock", daemon=True).start()

    def _created(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
        try:
            os.write(file, self._owner.content())
            os.fsync(file)
        except OSError:  # a full disk: the next run would wait for the owner of an empty file
            os.close(file)
            self.path.unlink()
            raise
        return file

    def _renew(self, file: int) -> None:
        while not self._has_ended.wait(BEAT_SECONDS):
            with suppress(OSError):  # one missed beat; if the lock is lost because of it, ``check`` reports that
                os.pwrite(file, self._owner.content(), 0)
                os.fsync(file)
        os.close(file)

    def check(self) -> None:
        """Raise UserError if the lock is lost, because this run was suspended or cut off from the disk for too long."""
        content = _content(self.path)
        if content is None or self._owner.token.encode() not in content:
            raise UserError(f"{self._flag}: {self.path} no longer belongs to this run: it was not renewed for "
                            f"{SILENT_SECONDS:.0f} s, or was removed, so another run may be writing there; this run "
                            f"stops writing")

    def release(self) -> None:
        """Release the directory; may be called again, and returns when it is released."""
        with self._changing:
            if not self._has_ended.is_set():
                self._has_ended.set()
                if self._file is not None:
                    with suppress(UserError, OSError):
                        self.check()
                        self.path.unlink()


class Claim:
    """The directories that a run has locked; none on most ranks."""

    def __init__(self) -> None:
        self._locks: tuple[Lock, ...] = ()

    def add(self, directories: Mapping[str, str], say: Callable[[str], None]) -> None:
        """Lock the directories that these flags gave, creating missing ones; ``say`` reports a wait.

        Raises UserError, and releases all directories, if another run holds one of them, or it cannot be written.
        """
        try:
            for path, flag in _lock_files(directories).items():
                with writing(path, flag):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    lock = Lock(path, flag)
                    self._locks = (*self._locks, lock)  # first, so that it is released if the run ends meanwhile
                    lock.acquire(say)
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raise UserError if any lock is lost."""
        problems: list[str] = []
        for lock in self._locks:
            with collected(problems):
                lock.check()
        refuse(problems)

    def release(self) -> None:
        """Release the directories, waiting only ``_RELEASE_SECONDS`` for an unresponsive disk."""
        threads = [threading.Thread(target=lock.release, name="release", daemon=True) for lock in self._locks]
        for thread in threads:
            thread.start()
        until = time.monotonic() + _RELEASE_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claim_problems(directories: Mapping[str, str]) -> list[str]:
    """Report directories that another run on this host is writing, without locking any.

    Runs on other hosts are found when the directories are locked.
    """
    problems: list[str] = []
    for path, flag in _lock_files(directories).items():
        with collected(problems):
            content = _content(path)
            owner = None if content is None else Owner.read(content)
            if owner is not None and owner.is_here() and owner.is_alive():
                raise _busy(path, flag, owner)
    return problems


def _lock_files(directories: Mapping[str, str]) -> dict[Path, str]:
    """The lock file of each directory, once, with the first flag that gave it."""
    found: dict[Path, str] = {}
    for flag, directory in directories.items():
        found.setdefault(Path(directory).resolve() / LOCK_FILE, f"{flag} {directory}")
    return found


def _left(path: Path, flag: str, say: Callable[[str], None]) -> bytes | None:
    """The content of a lock file whose owner is dead; None if there is no file.

    Raises UserError if its owner is alive.  For an owner on another host this takes up to ``SILENT_SECONDS``.
    """
    content = _content(path)
    if content is None:
        return None
    owner = Owner.read(content)
    if owner is not None and owner.is_here():
        if owner.is_alive():
            raise _busy(path, flag, owner)
        return content
    say(f"note: {flag} is claimed by {owner or 'a run'}; this run takes it over if {path} is not renewed within "
        f"{SILENT_SECONDS:.0f} s")
    until = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < until:
        time.sleep(min(1.0, SILENT_SECONDS))
        now = _content(path)
        if now is None:
            return None
        if now != content:
            raise _busy(path, flag, Owner.read(now))
    return content


def _busy(path: Path, flag: str, owner: Owner | None) -> UserError:
    return UserError(f"{flag} is being written by another run, {owner or 'which has just begun'} ({path}); wait until "
                     f"it ends, or give another directory")


def _content(path: Path) -> bytes | None:
    """Read the file, reopening it each time so that a shared disk asks its server; None if there is no file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _remove(path: Path, left: bytes) -> None:
    """Remove the lock file if its content is still ``left``, not one that another process has created meanwhile.

    A file lock lets one process at a time compare and remove.  If the disk has no locks across hosts, two hosts may do
    so at once; then ``Lock.check`` finds the loss.
    """
    with suppress(FileNotFoundError), path.open("r+b") as file:
        with suppress(OSError):  # the disk has no locks at all
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.samestat(path.stat(), os.fstat(file.fileno())) and file.read() == left:
            path.unlink()
