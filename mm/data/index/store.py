"""Caches indexes between runs: a folder of arrays whose names are hashes of all their inputs.

An index is ``KEY.npy`` and ``KEY.json``, written last.  Both are written to temporary files and renamed, so a run that
is killed leaves at most a temporary file.  A file that does not match its checksum is created again, with a note.
Selections of records, for datasets that do not use all, are kept in the same way.  ``files/`` has the checksum of each
file with its size and times, so that an unchanged file is not read at every start.  If several processes or nodes need
the same file, one creates it.
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
from typing import Any

import numpy as np

from mm.data.index.gauge import ROW
from mm.data.index.index import Bad, RecordIndex
from mm.data.index.rows import MappedRows, file_crc32
from mm.data.read.records import RecordFile
from mm.files import json_object, read_regular, replace_file, write_whole
from mm.lock import making

_FORM = 6
"""Increment when the same data would be read or measured differently."""
_CHECKSUM = "json_crc32"
"""Key of each JSON file: the checksum of its other content."""
_SETTLED_SECONDS = 2.0
"""A file modified less than this before it was read may change again without a new modification time."""


def key_of(content_hash: str, *facts: Any) -> str:
    """The name of the index for a file with this content, read and measured with these ``facts`` (JSON values)."""
    return hashlib.sha256(json.dumps([_FORM, ROW.descr, content_hash, *facts]).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Store:
    """Folders of indexes.  The first writable one is written, all are read."""

    folders: tuple[Path, ...]
    notes: list[str]
    """Receives a note for each damaged file."""

    @classmethod
    def of(cls, folder: str, notes: list[str]) -> "Store":
        """``folder``, with the user's cache folder as the fallback if it cannot be written."""
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return cls((Path(folder), Path(home) / "mm-data"), notes)

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
        name = f"files/{hashlib.sha256(real.encode(errors='surrogateescape')).hexdigest()[:32]}.json"

        def remember(sha256: str) -> None:
            self._write(lambda folder: _write_json(folder / name, {"stamp": stamp, "sha256": sha256, "form": _FORM}))

        def remembered() -> tuple[str, bool] | None:
            for folder in self.folders:
                found = self._json(folder / name)
                if found is not None and found.get("stamp") == stamp:
                    is_older = found.get("form") != _FORM
                    if is_older:
                        remember(found["sha256"])
                    return found["sha256"], is_older
            return None

        if (known := remembered()) is not None:
            return known
        with self.making(name.removesuffix(".json"), f"the checksum of {file.path}"):
            if (known := remembered()) is not None:
                return known
            sha256 = file.content_hash()
            if time.time() - status.st_mtime > _SETTLED_SECONDS:
                remember(sha256)
        return sha256, False

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
        return Kept(RecordIndex(rows, bad, (), tuple(manifest["boxes_outside"]), unread), f"{key} {rows.crc32}")

    def save(self, key: str, index: RecordIndex) -> str | None:
        """Save an index.  Returns a note if it is not kept in the first folder, or not at all."""
        assert not index.problems, "a file that was not read to the end has no index"
        return self._save_rows(key, index.rows.array, {"bad": [asdict(one) for one in index.bad],
                                                       "boxes_outside": list(index.boxes_outside),
                                                       "unread": index.unread})

    def numbers(self, facts: Any, choose: Callable[[], np.ndarray]) -> MappedRows:
        """The result of ``choose``, cached under the ``facts`` (JSON values) it depends on."""
        key = hashlib.sha256(json.dumps([_FORM, facts]).encode()).hexdigest()[:32]
        if (rows := self._load_rows(key)[0]) is not None:
            return rows
        with self.making(key, "the selection of the samples"):
            if (rows := self._load_rows(key)[0]) is not None:
                return rows
            numbers = choose()
            self._save_rows(key, numbers, {})
        return self._load_rows(key)[0] or MappedRows(numbers)

    def _load_rows(self, key: str) -> tuple[MappedRows | None, dict[str, Any]]:
        """Rows and their manifest.  A file that does not match its checksum counts as absent, with a note."""
        for folder in self.folders:
            manifest, path = self._json(folder / f"{key}.json"), folder / f"{key}.npy"
            if manifest is None:
                continue
            try:
                return MappedRows.open(str(path), manifest["crc32"]), manifest
            except OSError:
                continue
            except ValueError:
                self._note(path)
        return None, {}

    def _save_rows(self, key: str, rows: np.ndarray, more: dict[str, Any]) -> str | None:
        """Write rows, then their manifest.  Returns a note as ``_write`` does."""
        def write(folder: Path) -> None:
            path = folder / f"{key}.npy"
            replace_file(path, lambda stream: np.lib.format.write_array(stream, rows, allow_pickle=False))
            _write_json(folder / f"{key}.json", {"crc32": file_crc32(path), **more})

        return self._write(write)

    def _write(self, write: Callable[[Path], None]) -> str | None:
        """``write`` into the first folder that accepts it.  Returns a note if that is not the first folder."""
        reasons: list[str] = []
        for folder in self.folders:
            try:
                write(folder)
            except OSError as error:
                reasons.append(f"{folder} cannot be written ({error.strerror})")
                continue
            return f"the index of the samples is kept in {folder}, because {'; '.join(reasons)}" if reasons else None
        return (f"the index of the samples is kept in memory only, so every start creates it again: "
                f"{'; '.join(reasons)}.  Set basic_parameters.cache_dir to a writable folder")

    def _json(self, path: Path) -> dict[str, Any] | None:
        """The content of a JSON file; None if it is missing, or damaged, with a note."""
        try:
            content = json_object(read_regular(path))
            stated = content.pop(_CHECKSUM, None)
            if stated is None:  # a version before form 5 wrote it
                return None
            if stated == _checksum(content):
                return content
        except OSError:
            return None
        except ValueError:  # noted below
            pass
        self._note(path)
        return None

    def _note(self, path: Path) -> None:
        note = f"{path} does not match its checksum, and is created again"
        if note not in self.notes:
            self.notes.append(note)


@dataclass(frozen=True)
class Kept:
    """A cached index."""

    index: RecordIndex
    identity: str
    """Unique to this index."""


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_whole(path, json.dumps({**value, _CHECKSUM: _checksum(value)}).encode())


def _checksum(value: dict[str, Any]) -> int:
    """The checksum that a JSON file has of its other content."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
