"""One run at a time in each directory: a file in it says which process has it, on which host, and since when.

The first rank holds the file for all ranks, and removes it when the run ends.  A run that finds such a file asks
whether its owner is still there.  Under the same kernel the process itself answers.  For another host the file does:
its owner renews it every ``BEAT_SECONDS``, and one that is not renewed for ``SILENT_SECONDS`` has no owner any more.
That is watched, not computed from the time in the file: the clocks of two hosts may differ by any amount.

The directory may be on any disk where creating a file exclusively works, as on NFS, Lustre and GPFS; the operating
system's own locks do not work across hosts on each of them.
"""

import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from mm.errors import UserError, collected, refuse, writing

LOCK_FILE = ".mm-train.lock"
BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""Six beats: a shared disk may take some seconds for one, and a restart on another host waits no longer than this."""
_RELEASE_SECONDS = 5.0
"""How long the end of a run waits for a disk that does not answer."""


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock, as its file says."""

    token: str
    """Never the same twice."""
    host: str
    pid: int
    kernel: str
    """Which kernel, and which of its process tables, ``pid`` is of: containers have tables of their own."""
    started: str
    """When the process began, in ticks of that kernel: numbers of processes are used again."""
    since: str
    """Local time, for people."""

    @classmethod
    def here(cls) -> "Owner":
        """This process."""
        pid = os.getpid()
        return cls(secrets.token_hex(8), socket.gethostname(), pid, _kernel(), _started(pid) or "",
                   f"{datetime.now():%Y-%m-%d %H:%M:%S}")

    @classmethod
    def read(cls, content: bytes) -> "Owner | None":
        """Whose the file is; None for one that is not written yet."""
        try:
            return cls(**json.loads(content)["owner"])
        except (ValueError, KeyError, TypeError):
            return None

    def is_here(self) -> bool:
        """Whether it is a process of this kernel, so that one can ask whether it is still there."""
        return self.kernel != "" and self.kernel == _kernel()

    def is_alive(self) -> bool:
        """Of a process that ``is_here``."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            return True
        return _started(self.pid) == self.started

    def content(self) -> bytes:
        """The file now; always of the same length, so that renewing it is one write."""
        return json.dumps({"owner": asdict(self), "renewed": f"{time.time():.1f}"}).encode() + b"\n"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lock:
    """This process's hold on one directory, which a thread renews."""

    def __init__(self, path: Path, flag: str, say: Callable[[str], None]) -> None:
        """Create the lock file at ``path`` in the directory that ``flag`` gives, once nobody has it.

        Raises UserError when another process has it.
        """
        self.path, self._flag, self._owner = path, flag, Owner.here()
        while True:
            left = _left(path, flag, say)
            if left is not None:
                _remove(path, left)
            with suppress(FileExistsError):  # somebody was faster: ask again
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
                break
        os.write(self._file, self._owner.content())
        os.fsync(self._file)
        self._has_ended = threading.Event()
        threading.Thread(target=self._renew, name="lock", daemon=True).start()

    def _renew(self) -> None:
        while not self._has_ended.wait(BEAT_SECONDS):
            with suppress(OSError):  # one beat less; if the lock gets lost by it, ``check`` says so
                os.pwrite(self._file, self._owner.content(), 0)
                os.fsync(self._file)
        os.close(self._file)

    def check(self) -> None:
        """Raise UserError when another run took this one for dead, because it was stopped or cut off from the disk."""
        content = _content(self.path)
        if content is None or self._owner.token.encode() not in content:
            raise UserError(f"{self._flag}: {self.path} is not this run's any more: it was not renewed for "
                            f"{SILENT_SECONDS:.0f} s, or was removed, so another run may be writing there; this run "
                            f"writes no more")

    def release(self) -> None:
        """Let others have the directory; again is fine."""
        if not self._has_ended.is_set():
            self._has_ended.set()
            with suppress(UserError, OSError):
                self.check()
                self.path.unlink()


class Claim:
    """The directories that a run holds; on most ranks none."""

    def __init__(self, locks: Sequence[Lock] = ()) -> None:
        self._locks = locks

    @classmethod
    def take(cls, directories: Mapping[str, str], say: Callable[[str], None]) -> Self:
        """Hold the directories that these flags give, making them where they are missing; ``say`` tells of a wait.

        Raises UserError when another run has one of them, or it cannot be written.
        """
        locks: list[Lock] = []
        try:
            for path, flag in _lock_files(directories).items():
                with writing(path, flag):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    locks.append(Lock(path, flag, say))
        except BaseException:
            cls(locks).release()
            raise
        return cls(locks)

    def check(self) -> None:
        """Raise UserError when one of them is not this run's any more."""
        problems: list[str] = []
        for lock in self._locks:
            with collected(problems):
                lock.check()
        refuse(problems)

    def release(self) -> None:
        """Let others have the directories; does not wait long for a disk that does not answer."""
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
    """Which of the directories that these flags give another run on this host is writing; nothing is claimed.

    Of another host's that is found out when the run claims them.
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
    """Of each directory once, with the first flag that gives it."""
    found: dict[Path, str] = {}
    for flag, directory in directories.items():
        found.setdefault(Path(directory).resolve() / LOCK_FILE, f"{flag} {directory}")
    return found


def _left(path: Path, flag: str, say: Callable[[str], None]) -> bytes | None:
    """The content of a lock file whose owner is gone; None where there is no file.

    Raises UserError when its owner is there.  Of another host's that takes up to ``SILENT_SECONDS`` to find out.
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
    return UserError(f"{flag} is being written by another run, {owner or 'which has just begun'} ({path}); wait for "
                     f"its end, or give another directory")


def _content(path: Path) -> bytes | None:
    """Opened anew each time: that is when a shared disk asks its server; None where there is no file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _remove(path: Path, left: bytes) -> None:
    """Remove the lock file ``left``, and no other that another process may have put in its place meanwhile.

    Of processes that want to remove the same file, one at a time compares and removes.  Where the disk has no locks
    across hosts, two hosts may do so at once; then ``Lock.check`` finds out.
    """
    with suppress(FileNotFoundError), path.open("r+b") as file:
        with suppress(OSError):  # the disk has no locks at all
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.samestat(path.stat(), os.fstat(file.fileno())) and file.read() == left:
            path.unlink()


def _started(pid: int) -> str | None:
    """When a process began; None for one that is not there, or has ended and is still listed."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def _kernel() -> str:
    """Empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
