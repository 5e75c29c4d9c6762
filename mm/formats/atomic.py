"""Directories that appear complete or not at all, for conversions and training checkpoints.

Everything is written to a temporary sibling, which is renamed at the end.  A conversion can also be resumed: a journal
beside its temporary directory ``.NAME.mm-convert`` lists the finished files, with the checksums of their tensors.  The
same conversion continues from there; a different one starts over.
"""

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mm.errors import UserError, refuse
from mm.files import json_object, regular, whole_lines
from mm.formats.files import Files
from mm.weights.plan import TargetFile

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


class Output:
    """The target of a conversion in progress.  Thread-safe."""

    def __init__(self, target: Path, fingerprint: str, modes: Modes, journal: BinaryIO) -> None:
        self.target = target
        self.folder = _temporary(target)
        self._modes = modes
        self._fingerprint = fingerprint
        self._journal = journal
        self._lock = threading.Lock()
        self.finished: dict[str, dict[str, int]] = {}
        """Checksums of the tensors of each finished file, by file name."""

    @classmethod
    def begin(cls, target: Path, fingerprint: str, modes: Modes) -> "Output":
        """Lock ``target`` (a resolved path) for the conversion ``fingerprint``, and reuse files that it has finished.

        ``modes``: permissions of directories and weight files; the caller of ``commit`` writes the small files.  Raises
        UserError if another process is writing the target.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        path = _journal(target)
        refuse(_links((path, _temporary(target), _old(target))))
        journal = os.fdopen(
            regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, modes.file), "r+b")
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = path.exists() and os.path.samestat(path.stat(), os.fstat(journal.fileno()))
        except BlockingIOError:
            is_current = False
        if not is_current:  # locked by another run, or just removed by one that is completing
            journal.close()
            raise UserError(
                f"Another mm-convert is writing {target} (it holds {path}); wait for it, or give another target."
            )
        output = cls(target, fingerprint, modes, journal)
        finished = _read_journal(path, fingerprint)
        if finished is None or not output.folder.is_dir():
            output._start_over()
        else:
            output.finished = finished
            journal.truncate(len(b"".join(_journal_lines(path))))
        return output

    def _start_over(self) -> None:
        self.finished = {}
        self._journal.truncate(0)
        os.fsync(self._journal.fileno())
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(mode=self._modes.directory)
        self._append({"conversion": self._fingerprint})

    def drop_damaged(self, files: Sequence[TargetFile]) -> list[str]:
        """Forget finished files whose bytes do not match the journal, and return their names.

        A damaged journal may also name files that this conversion does not write; they are forgotten, too.
        """
        names = {file.name for file in files}
        self.finished = {name: crc32s for name, crc32s in self.finished.items() if name in names}
        damaged = [file.name for file in files if file.name in self.finished
                   and not is_intact(self.folder, file, self.finished[file.name])]
        for name in damaged:
            del self.finished[name]
        return damaged

    def create(self, file: TargetFile) -> None:
        """Create a file at its full size, to be filled."""
        path = self.folder / file.name
        for parent in reversed(Path(file.name).parents):  # mkdir(parents=True) ignores the mode for parents
            (self.folder / parent).mkdir(mode=self._modes.directory, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, self._modes.file)
        try:
            os.ftruncate(descriptor, file.num_bytes)
        finally:
            os.close(descriptor)

    def finish(self, file: TargetFile, crc32s: Crc32s) -> None:
        """Finish ``file`` once all its tensors are written: add its frame, flush it, and record it in the journal."""
        path = self.folder / file.name
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            for offset, data in file.frame(crc32s):
                os.pwrite(descriptor, data, offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with self._lock:
            self.finished[file.name] = dict(crc32s)
            self._append({"file": file.name, "crc32": dict(crc32s)})

    def commit(self, write_others: Callable[[Path, Mapping[str, Crc32s]], None]) -> None:
        """Write the small files, rename the directory into place, and remove the old target and the journal."""
        write_others(self.folder, self.finished)
        for path in (*self.folder.rglob("*"), self.folder):
            sync(path)
        if self.target.exists() and _old(self.target).exists():
            shutil.rmtree(_old(self.target))
        put_in_place(self.folder, self.target, _old(self.target))
        tidy(self.target)

    def close(self) -> None:
        """Release the lock; finished files stay for the next run."""
        self._journal.close()

    def _append(self, entry: Mapping[str, object]) -> None:
        self._journal.write(_line(entry))
        self._journal.flush()
        os.fsync(self._journal.fileno())


def is_complete(target: Path, fingerprint: str, files: Sequence[TargetFile]) -> bool:
    """Whether an earlier run of the same conversion completed everything except the final cleanup."""
    finished = _read_journal(_journal(target), fingerprint)
    return (
        finished is not None
        and not _temporary(target).exists()
        and all(file.name in finished and is_intact(target, file, finished[file.name]) for file in files)
    )


def tidy(target: Path) -> None:
    """Remove the old target and the journal after a complete conversion."""
    if _old(target).exists():
        shutil.rmtree(_old(target))
    _journal(target).unlink()


def left_bytes(target: Path) -> int:
    """Disk space of files that an interrupted run left for ``target``; they will be reused or freed."""
    folder = _temporary(target)
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*")) if folder.is_dir() else 0


def is_intact(folder: Path, file: TargetFile, crc32s: Crc32s | None = None) -> bool:
    """Whether ``file`` in ``folder`` has the right size, frame and checksums (None: any checksums)."""
    path = folder / file.name
    if not path.is_file() or path.stat().st_size != file.num_bytes:
        return False
    with path.open("rb", buffering=0) as opened, Files(folder) as files:
        found = {tensor.name: files.crc32(tensor) for tensor in file.tensors}
        is_framed = all(os.pread(opened.fileno(), len(data), at) == data for at, data in file.frame(found))
        return is_framed and crc32s in (None, found)


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.mm-convert")


def _journal(target: Path) -> Path:
    return target.with_name(f".{target.name}.mm-convert.journal")


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.mm-convert.old")


def _links(paths: Sequence[Path]) -> Iterator[str]:
    """Links under the names of temporary files, which are known in advance so that a conversion can be continued.
    Through a link, it would write elsewhere."""
    for path in paths:
        if path.is_symlink():
            yield f"{path}: is a link, which mm-convert never makes; remove it, or give another target."


def _journal_lines(path: Path) -> list[bytes]:
    """The complete lines of a journal; a crash while writing can leave a partial last line."""
    return whole_lines(path.read_bytes()) if path.is_file() else []


def _read_journal(path: Path, fingerprint: str) -> dict[str, dict[str, int]] | None:
    """Finished files with their checksums; None if the journal belongs to another conversion than ``fingerprint``.

    A file with a damaged line counts as not finished, so it is written again.
    """
    lines = _journal_lines(path)
    if not lines or lines[0] != _line({"conversion": fingerprint}):
        return None
    finished: dict[str, dict[str, int]] = {}
    for line in lines[1:]:
        try:
            entry = json_object(line)
            name, crc32s = entry["file"], dict(entry["crc32"])
        except (ValueError, TypeError, KeyError):
            continue
        if isinstance(name, str):
            finished[name] = crc32s
    return finished


def _line(entry: Mapping[str, object]) -> bytes:
    return json.dumps(entry).encode() + b"\n"
