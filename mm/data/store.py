"""Where indexes are kept between runs: a folder of arrays, each found by what it was made of.

An index is ``KEY.npy`` and ``KEY.json``, the latter written last.  Both are written beside and renamed, so several
nodes may make the same one at once, and a run that is killed leaves at most a temporary file.  A damaged one counts as
absent.  ``files/`` remembers the checksum of each file by its size and times, so that it is not read at every start.
"""

import hashlib
import json
import os
import secrets
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from mm.data.gauge import ROW
from mm.data.index import Bad, Index
from mm.data.records import RecordFile

_FORM = 3
"""Goes up when the same words would be read or measured otherwise."""
_SETTLED_SECONDS = 2.0
"""A file that was changed later than this before it was read may be changed again within one tick of its clock."""


def key_of(content_hash: str, *facts: Any) -> str:
    """The name of an index of a file with this content, read and measured as ``facts`` (JSON values) say."""
    return hashlib.sha256(json.dumps([_FORM, ROW.descr, content_hash, *facts]).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Store:
    """Folders of indexes: the first one that can be written is used, all are read."""

    folders: tuple[Path, ...]

    @classmethod
    def of(cls, folder: str) -> "Store":
        """``folder``, and the user's own cache where that cannot be written."""
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return cls((Path(folder), Path(home) / "mm-data"))

    def content_hash(self, file: RecordFile) -> tuple[str, bool]:
        """Of the bytes of ``file``, which are read only where its size or times are new; and whether an older version
        of this program, whose indexes are not read, has made one of it.  Raises UserError when it cannot be read."""
        real, status = os.path.realpath(file.path), os.stat(file.path)
        stamp = [real, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        name = f"files/{hashlib.sha256(real.encode(errors='surrogateescape')).hexdigest()[:32]}.json"
        for folder in self.folders:
            remembered = _json(folder / name)
            if remembered is not None and remembered.get("stamp") == stamp:
                is_older = remembered.get("form") != _FORM
                if is_older:
                    self._write({name: _text(remembered | {"form": _FORM})})
                return remembered["sha256"], is_older
        found = file.content_hash()
        if time.time() - status.st_mtime > _SETTLED_SECONDS:
            self._write({name: _text({"stamp": stamp, "sha256": found, "form": _FORM})})
        return found, False

    def load(self, key: str) -> tuple[Index, str] | None:
        """An index and the file of its rows, which is mapped into memory; None where there is none."""
        for folder in self.folders:
            manifest, path = _json(folder / f"{key}.json"), folder / f"{key}.npy"
            rows = None if manifest is None else mapped(str(path))
            if manifest is None or rows is None or _crc32(rows) != manifest["crc32"]:
                continue
            bad = tuple(Bad(**one) for one in manifest["bad"])
            return Index(rows, bad, (), tuple(manifest["boxes_outside"])), str(path)
        return None

    def save(self, key: str, index: Index) -> tuple[str | None, str | None]:
        """Keep an index; returns the file of its rows, None where no folder can be written, and what to say of it."""
        assert not index.problems, "a file that was not read to its end has no index"
        manifest = {"crc32": _crc32(index.rows), "num_records": len(index.rows),
                    "bad": [asdict(one) for one in index.bad], "boxes_outside": list(index.boxes_outside)}
        return self._write({f"{key}.npy": lambda stream: np.save(stream, index.rows, allow_pickle=False),
                            f"{key}.json": _text(manifest)})

    def _write(self, files: dict[str, Callable[[IO[bytes]], Any]]) -> tuple[str | None, str | None]:
        """Write files into the first folder that takes them: the first one's path, and a note where it was not the
        first folder."""
        reasons: list[str] = []
        for folder in self.folders:
            try:
                for name, write in files.items():
                    replace_file(folder / name, write)
            except OSError as error:
                reasons.append(f"{folder} cannot be written ({error.strerror})")
                continue
            note = f"the index of the samples is kept in {folder}, because {'; '.join(reasons)}" if reasons else None
            return str(folder / next(iter(files))), note
        return None, (f"the index of the samples is kept in memory, so every start makes it again: "
                      f"{'; '.join(reasons)}.  Name a folder that can be written as basic_parameters.cache_dir")


def mapped(path: str) -> np.ndarray | None:
    """The rows in a file, mapped into memory; None where it holds none."""
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):  # absent, or damaged: then it is made again
        return None
    return rows if rows.dtype == ROW and rows.ndim == 1 else None


def _crc32(rows: np.ndarray) -> int:
    return zlib.crc32(cast(Any, rows.view(np.uint8)))


def _json(path: Path) -> dict[str, Any] | None:
    """What a file of ours holds; None where it is absent or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _text(value: Any) -> Callable[[IO[bytes]], Any]:
    return lambda stream: stream.write(json.dumps(value).encode())


def write_whole(path: Path, content: bytes) -> None:
    """As ``replace_file``, where all of it is there."""
    replace_file(path, lambda stream: stream.write(content))


def replace_file(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file beside and rename it: whoever reads ``path`` sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as stream:
            write(stream)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
