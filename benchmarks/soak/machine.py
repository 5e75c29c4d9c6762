"""What a launch finds on its machine, and how it changes: a small disk that fills up or slows down, a clock that jumps.

Each needs something that a machine may lack; ``why_not`` then says what.
"""

import errno
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

from typing_extensions import Self

DISK_BYTES = 200 << 20
"""Room for three checkpoints of the tiny model and its export."""
SLOW_BYTES_PER_SECOND = 4 << 20
DAY_SECONDS = 24 * 60 * 60
_PRIVATE = "MM_SOAK_PRIVATE"
"""Environment variable: this process has mounts and shared memory of its own."""
_GROUPS = Path("/sys/fs/cgroup/blkio")
_LEAVING_SECONDS = 20.0
_LIMIT = "blkio.throttle.write_bps_device"


def with_own_mounts() -> None:
    """Replace this process by one with its own mounts and shared memory, if the system allows that.

    What it mounts then disappears with it, however it ends, and files in /dev/shm are its own.
    """
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0 or _PRIVATE in os.environ:
        return
    if subprocess.run([unshare, "--mount", "--ipc", "true"], check=False, capture_output=True).returncode:
        return
    os.environ[_PRIVATE] = "1"
    os.execv(unshare, [unshare, "--mount", "--ipc", sys.executable, "-m", "benchmarks.soak", *sys.argv[1:]])


def has_own_mounts() -> bool:
    return _PRIVATE in os.environ


class SmallDisk:
    """An ext4 file system in a file, mounted at ``folder``; without ``why_not`` it is a plain folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.why_not = "it needs root, and unshare to mount a disk" if not has_own_mounts() else None
        self.why_not_slow = self.why_not
        self._filler, self._group = folder / "filler", _GROUPS / f"mm-soak-{os.getpid()}"
        self._device = ""

    def __enter__(self) -> Self:
        if self.why_not is not None:
            return self
        image = self.folder.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        for words in (["mkfs.ext4", "-q", "-m", "0", image], ["mount", "-o", "loop", image, self.folder],
                      ["mount", "-t", "tmpfs", "soak", "/dev/shm"]):
            subprocess.run(words, check=True)
        shutil.rmtree(self.folder / "lost+found")
        device = self.folder.stat().st_dev
        self._device = f"{os.major(device)}:{os.minor(device)}"
        if (_GROUPS / _LIMIT).exists():
            self._group.mkdir()
        else:
            self.why_not_slow = f"it needs {_GROUPS / _LIMIT}, of Linux control groups version 1"
        return self

    def __exit__(self, *_: object) -> None:
        until = time.monotonic() + _LEAVING_SECONDS
        while self._group.exists():
            try:
                self._group.rmdir()
            except OSError:  # a killed process has not quite ended
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        if self.why_not is None:
            subprocess.run(["umount", self.folder], check=True)

    def serve(self, pid: int) -> None:
        """Let ``slow`` apply to this process, and to those that it starts from now on."""
        if self.why_not_slow is None:
            (self._group / "cgroup.procs").write_text(str(pid))

    def slow(self, is_slow: bool) -> None:
        """Limit what the processes write to the disk itself: their fsync waits for that."""
        limit = SLOW_BYTES_PER_SECOND if is_slow else 0  # 0 is no limit
        (self._group / _LIMIT).write_text(f"{self._device} {limit}")

    def fill(self, left_bytes: int) -> None:
        """Take all room but ``left_bytes``, or all there is."""
        size, piece = 0, shutil.disk_usage(self.folder).free - left_bytes
        with self._filler.open("wb") as file:
            while piece > 0:
                try:
                    os.posix_fallocate(file.fileno(), size, piece)
                    size, piece = size + piece, 0 if left_bytes else piece
                except OSError as error:  # the file system needs some room for itself
                    if error.errno != errno.ENOSPC:
                        raise
                    piece //= 2

    def make_room(self) -> None:
        self._filler.unlink()


class ShiftedClock:
    """The wall clock as launches see it: that of the machine, moved by whole days."""

    def __init__(self, folder: Path) -> None:
        self._file, self._library = folder / "clock", folder / "clock.so"
        self.why_not = None if shutil.which("gcc") else "it needs gcc, to compile what moves the clock of a process"
        if self.why_not is None:
            subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", self._library,
                            Path(__file__).with_name("clock.c"), "-ldl"], check=True)  # fmt: skip
            self._file.write_bytes(struct.pack("q", 0))

    @property
    def environment(self) -> dict[str, str]:
        """Variables of launches."""
        return {} if self.why_not else {"LD_PRELOAD": str(self._library), "MM_SOAK_CLOCK": str(self._file)}

    def jump(self, days: int) -> None:
        """Move the clock, of all running launches too."""
        with self._file.open("r+b") as file:
            (before,) = struct.unpack("q", file.read())
            file.seek(0)
            file.write(struct.pack("q", before + days * DAY_SECONDS))
