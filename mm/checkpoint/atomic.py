"""Directories that appear complete or not at all, for conversions and training checkpoints.

Everything is written to a temporary sibling, which is renamed at the end.  If a conversion is interrupted, its finished
files stay there, and the same conversion continues after them.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mm.errors import UserError, refuse
from mm.files import regular
from mm.weights.views import TargetFile

Crc32s = Mapping[str, int]


@dataclass(frozen=True)
class Modes:
    """Permissions of directories and files, before the umask is applied."""

    directory: int
    file: int


MEGATRON_MODES = Modes(0o750, 0o640)
"""Megatron's and MindSpeed-MM's permissions for checkpoints."""
PLAIN_MODES = Modes(0o777, 0o666)
"""Default permissions: only the umask restricts them."""
PART = ".part"
"""End of the name of a file that is not finished."""


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_file(path: Path, mode: int) -> Iterator[BinaryIO]:
    """Open a new file for writing, which must not exist yet.  It is flushed to disk when the block ends."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
        yield opened
        opened.flush()
        os.fsync(opened.fileno())


def put_in_place(finished: Path, target: Path, aside: Path) -> None:
    """Rename a directory, already flushed to disk, to ``target``.  An existing target is renamed to ``aside``."""
    replaces = target.exists()
    if replaces:
        target.rename(aside)
    try:
        finished.rename(target)
    except OSError:
        if replaces:
            aside.rename(target)
        raise
    sync(target.parent)


@contextmanager
def unfinished(target: Path, conversion: str, modes: Modes) -> Iterator[Path]:
    """The temporary directory of ``target``, locked, with the files that an interrupted ``conversion`` has finished.

    ``conversion`` identifies sources and target; what another one left is deleted.  Raises UserError if another process
    is writing the target.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder, path = _temporary(target), _sibling(target, "lock")
    refuse(f"{one}: is a link, which mm-convert never makes; remove it, or give another target."
           for one in (path, folder, _sibling(target, "old")) if one.is_symlink())
    with os.fdopen(regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, modes.file), "r+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = path.exists() and os.path.samestat(path.stat(), os.fstat(lock.fileno()))
        except BlockingIOError:
            is_current = False
        if not is_current:  # locked by another process, or just removed by one that is completing
            raise UserError(f"Another mm-convert is writing {target} (it holds {path}); wait for it, or give another "
                            f"target.")
        if not folder.is_dir() or lock.read() != conversion.encode():
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(mode=modes.directory)
            lock.truncate(0)
            lock.seek(0)
            lock.write(conversion.encode())
            lock.flush()
        yield folder


def begin_file(folder: Path, file: TargetFile, modes: Modes) -> None:
    """Create ``file`` under its name with ``PART`` at its full size, to be filled."""
    for parent in reversed(Path(file.name).parents):  # mkdir(parents=True) ignores the mode for parents
        (folder / parent).mkdir(mode=modes.directory, exist_ok=True)
    part = os.open(folder / (file.name + PART), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, modes.file)
    try:
        os.ftruncate(part, file.num_bytes)
    finally:
        os.close(part)


def finish_file(folder: Path, file: TargetFile, crc32s: Crc32s) -> None:
    """Add the frame of ``file``, whose tensors are written, flush it, and give it its name."""
    part = folder / (file.name + PART)
    with part.open("r+b", buffering=0) as opened:
        for offset, data in file.frame(crc32s):
            os.pwrite(opened.fileno(), data, offset)
        os.fsync(opened)
    part.rename(folder / file.name)


def commit(folder: Path, target: Path) -> None:
    """Flush the temporary directory of ``target`` to disk, rename it, and delete the old target."""
    for path in (*folder.rglob("*"), folder):
        sync(path)
    shutil.rmtree(_sibling(target, "old"), ignore_errors=True)
    put_in_place(folder, target, _sibling(target, "old"))
    tidy(target)


def tidy(target: Path) -> None:
    """Delete what is beside a complete ``target``."""
    shutil.rmtree(_sibling(target, "old"), ignore_errors=True)
    _sibling(target, "lock").unlink(missing_ok=True)


def left_bytes(target: Path) -> int:
    """Disk space of files that an interrupted run left for ``target``; they will be reused or freed."""
    folder = _temporary(target)
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*")) if folder.is_dir() else 0


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.mm-convert")


def _sibling(target: Path, word: str) -> Path:
    return target.with_name(f".{target.name}.mm-convert.{word}")
