"""Caches indexes between runs: a folder of arrays whose names are hashes of all their inputs.

An index is ``KEY.rows`` and ``KEY.json``, written last.  Both are written to temporary files and renamed, so a run that
is killed leaves at most a temporary file.  A damaged index counts as absent.  Selections of records, for datasets that
do not use all, are kept in the same way.  ``files/`` has the checksum of each file with its size and times, so that an
unchanged file is not read at every start.  If several processes or nodes need the same file, one creates it.
"""

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from mm.data.index.gauge import ROW
from mm.data.index.index import Bad, RecordIndex
from mm.data.index.rows import Column, IndexRows, MappedBytes, packed_numbers
from mm.data.read.records import RecordFile
from mm.files import json_object, read_regular, regular, replace_file
from mm.lock import making

_FORM = 6
"""Increment when the same data would be read or measured differently."""
_CHECKSUM = "json_crc32"
"""Key of each JSON file: the checksum of its other content."""
_SETTLED_SECONDS = 2.0
"""A file modified less than this before it was read may change again without a new modification time."""
_READ_BYTES = 1 << 24
"""Bytes read at a time."""


def key_of(content_hash: str, *facts: Any) -> str:
    """The name of the index for a file with this content, read and measured with these ``facts`` (JSON values)."""
    return hashlib.sha256(json.dumps([_FORM, ROW.descr, content_hash, *facts]).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Store:
    """Folders of indexes.  The first writable one is written, all are read."""

    folders: tuple[Path, ...]

    @classmethod
    def of(cls, folder: str) -> "Store":
        """``folder``, with the user's cache folder as the fallback if it cannot be written."""
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return cls((Path(folder), Path(home) / "mm-data"))

    @property
    def folder(self) -> str | None:
        """The first writable folder; None if there is none."""
        for folder in self.folders:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
                return str(folder)
        return None

    def content_hash(self, file: RecordFile) -> tuple[str, bool]:
        """The hash of ``file``, which is read only if its size or times are new, and whether an older version
        of this program, whose indexes are not used, has indexed it.  Raises UserError when it cannot be read."""
        real, status = os.path.realpath(file.path), os.stat(file.path)
        stamp = [real, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        name = f"files/{hashlib.sha256(real.encode(errors='surrogateescape')).hexdigest()[:32]}"

        def remembered() -> tuple[str, bool] | None:
            for folder in self.folders:
                found = _json(folder / f"{name}.json")
                if found is not None and found.get("stamp") == stamp:
                    is_older = found.get("form") != _FORM
                    if is_older:
                        self._write({f"{name}.json": _text(found | {"form": _FORM})})
                    return found["sha256"], is_older
            return None

        if (known := remembered()) is not None:
            return known
        with self.making(name, f"the checksum of {file.path}"):
            if (known := remembered()) is not None:
                return known
            found = file.content_hash()
            if time.time() - status.st_mtime > _SETTLED_SECONDS:
                self._write({f"{name}.json": _text({"stamp": stamp, "sha256": found, "form": _FORM})})
        return found, False

    @contextmanager
    def making(self, name: str, what: str) -> Iterator[None]:
        """Lets only this process create the file ``name``.  Check again inside: another process may have created it.

        If no folder can be written, every process creates its own.
        """
        with ExitStack() as stack:
            for folder in self.folders:
                with suppress(OSError):
                    stack.enter_context(making(folder / f"{name}.lock", what))
                    break
            yield

    def load(self, key: str) -> "Kept | None":
        """An index with its rows mapped into memory; None if there is none."""
        rows, manifest = self._load_rows(key)
        if rows is None:
            return None
        bad = tuple(Bad(**one) for one in manifest["bad"])
        unread = {name: (count, first) for name, (count, first) in manifest["unread"].items()}
        found = RecordIndex(rows, bad, (), tuple(manifest["boxes_outside"]), unread)
        return Kept(found, f"{key} {manifest['crc32']}")

    def save(self, key: str, index: RecordIndex) -> str | None:
        """Save an index.  Returns a note if it is not kept in the first folder, or not at all."""
        assert not index.problems, "a file that was not read to the end has no index"
        return self._save_rows(key, index.rows, {"bad": [asdict(one) for one in index.bad],
                                                 "boxes_outside": list(index.boxes_outside), "unread": index.unread})

    def numbers(self, facts: Any, choose: Callable[[], np.ndarray]) -> IndexRows:
        """The result of ``choose`` as the column ``number``, cached under the ``facts`` (JSON values) it depends on."""
        key = hashlib.sha256(json.dumps([_FORM, facts]).encode()).hexdigest()[:32]
        if (rows := self._load_rows(key)[0]) is not None:
            return rows
        with self.making(key, "the selection of the samples"):
            if (rows := self._load_rows(key)[0]) is not None:
                return rows
            rows = packed_numbers(choose(), self.folder)
            self._save_rows(key, rows, {})
        return self._load_rows(key)[0] or rows

    def _load_rows(self, key: str) -> tuple[IndexRows | None, dict[str, Any]]:
        """Rows and their manifest.  A file that does not match the manifest counts as absent."""
        for folder in self.folders:
            manifest, path, crc32 = _json(folder / f"{key}.json"), folder / f"{key}.rows", 0
            if manifest is None:
                continue
            with suppress(OSError):
                with open(path, "rb", opener=regular) as stream:
                    while block := stream.read(_READ_BYTES):  # a map would count as memory of this process
                        crc32 = zlib.crc32(block, crc32)
                    piece = MappedBytes.map(stream, str(path)) if crc32 == manifest["crc32"] else None
                if piece is not None:
                    columns = tuple(Column(**one) for one in manifest["columns"])
                    return IndexRows(piece, columns, manifest["num_packed"], manifest["num_rows"]), manifest
        return None, {}

    def _save_rows(self, key: str, rows: IndexRows, more: dict[str, Any]) -> str | None:
        """Write rows, then their manifest.  Returns a note as ``_write`` does."""
        crc32, content = 0, rows.piece.content
        facts = {"columns": [asdict(one) for one in rows.columns], "num_packed": rows.num_packed, "num_rows": len(rows)}

        def write(stream: IO[bytes]) -> None:
            nonlocal crc32
            crc32 = 0
            for first in range(0, len(content), _READ_BYTES):
                block = content[first : first + _READ_BYTES].tobytes()
                crc32 = zlib.crc32(block, crc32)
                stream.write(block)

        def describe(stream: IO[bytes]) -> None:  # written after the rows, because it contains their checksum
            _text({"crc32": crc32, **facts, **more})(stream)

        return self._write({f"{key}.rows": write, f"{key}.json": describe})

    def _write(self, files: dict[str, Callable[[IO[bytes]], Any]]) -> str | None:
        """Write files into the first folder that accepts them.  Returns a note if that is not the first folder."""
        reasons: list[str] = []
        for folder in self.folders:
            try:
                for name, write in files.items():
                    replace_file(folder / name, write)
            except OSError as error:
                reasons.append(f"{folder} cannot be written ({error.strerror})")
                continue
            return f"the index of the samples is kept in {folder}, because {'; '.join(reasons)}" if reasons else None
        return (f"the index of the samples is kept in memory only, so every start creates it again: "
                f"{'; '.join(reasons)}.  Set basic_parameters.cache_dir to a writable folder")


@dataclass(frozen=True)
class Kept:
    """A cached index."""

    index: RecordIndex
    identity: str
    """Unique to this index."""


def _json(path: Path) -> dict[str, Any] | None:
    """The content of a JSON file; None if it is missing or damaged.

    Versions before form 5 wrote no checksum; of their files, only those with the hash of a data file are accepted.
    """
    try:
        content = json_object(read_regular(path))
    except (OSError, ValueError):
        return None
    stated = content.pop(_CHECKSUM, None)
    is_older = stated is None and content.get("form") != _FORM and isinstance(content.get("sha256"), str)
    return content if is_older or stated == _checksum(content) else None


def _text(value: dict[str, Any]) -> Callable[[IO[bytes]], Any]:
    return lambda stream: stream.write(json.dumps({**value, _CHECKSUM: _checksum(value)}).encode())


def _checksum(value: dict[str, Any]) -> int:
    """The checksum that a JSON file has of its other content."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
