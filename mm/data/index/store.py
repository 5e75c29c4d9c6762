"""Keeps indexes between runs: a folder of tables whose names are hashes of all that they depend on.

An index is ``KEY.rows``, a row of ``ROW`` for each record, and ``KEY.json``, written last.  ``KEY.numbers`` are the
records that a dataset uses.  ``files/`` has the checksum of each file of records, named by its size and times, so that
an unchanged file is not read at every start.  Each file ends with the crc32 of the rest; one that does not match it is
created again, with a note.
"""

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mm.config.data import DataConfig
from mm.data.index.measure import ROW
from mm.data.lengths import Lengths
from mm.data.records.record_name import BadSample
from mm.data.records.records import RecordFile
from mm.errors import UserError, writing
from mm.files import json_object, replace_file
from mm.lock import making

CACHE_DIR = ".mm-index"
"""Folder in ``dataset_dir``, used if the data JSON does not set ``cache_dir``."""
_FORM = 8
"""Increment when the same data would be read or measured differently."""
NUMBER = np.dtype(np.uint32)
"""Numbers a record over all files: up to 4,294,967,295, more than any realistic index."""
_SETTLED_SECONDS = 2.0
"""A file modified less than this before it was read may change again without a new modification time."""
_CRC32_BYTES = 4
_BYTE = np.dtype(np.uint8)


class Rows:
    """A table that the processes of a node map into memory and share.  Pickles as the path of its file if it has one.
    """

    def __init__(self, array: np.ndarray, path: str | None = None) -> None:
        self.array, self.path = array, path

    @classmethod
    def open(cls, path: str, dtype: np.dtype, checks: bool = True) -> "Rows":
        """Map a file of a ``Store``.  Raises OSError, and with ``checks`` ValueError if the file is damaged."""
        raw = np.memmap(path, _BYTE, "r") if os.path.getsize(path) else np.empty(0, _BYTE)
        if checks and raw[-_CRC32_BYTES:].tobytes() != _crc32(raw[:-_CRC32_BYTES]):
            raise ValueError(f"{path} does not match its checksum")
        return cls(raw[:-_CRC32_BYTES].view(dtype), path)

    def __len__(self) -> int:
        return len(self.array)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            return Rows, (np.array(self.array),)
        return Rows.open, (self.path, self.array.dtype, False)


@dataclass(frozen=True)
class Columns:
    """The measurements of all samples of a dataset, column by column, from the indexes of its files.

    Only requested data are loaded into memory, and it pickles as file paths.
    """

    files: tuple[Rows, ...]
    """For each file, the columns of ``ROW`` of all its records."""
    taken: Rows
    """uint32: the record of each sample, counted over all files."""

    def __len__(self) -> int:
        return len(self.taken)

    def of(self, numbers: np.ndarray) -> Lengths:
        """The lengths of these samples, in the given order, loaded into memory."""
        return Lengths(**{one.name: self.values(one.name, numbers) for one in fields(Lengths)})

    def values(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """One column for these samples, in the given order, loaded into memory."""
        files, records = self.places(numbers)
        found = np.empty(len(records), ROW[name])
        for file in np.unique(files).tolist():
            is_here = files == file
            found[is_here] = self.files[file].array[name][records[is_here]]
        return found

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The file of each of these samples, and its record in that file; int64."""
        records = self.taken.array[numbers].astype(np.int64)
        files = np.searchsorted(self._ends, records, side="right")
        return files, records - np.concatenate([[0], self._ends])[files]

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(rows) for rows in self.files])


@dataclass(frozen=True)
class RecordIndex:
    """The records of one file, in file order."""

    rows: Rows
    """The columns of ``ROW``."""
    bad: tuple[BadSample, ...] = ()
    noted: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Oddities of good records: how many records have each, and the first of them."""
    problems: tuple[str, ...] = ()
    """Why the file could not be read to the end."""
    identity: str = ""
    """Differs from that of any other index that is kept."""


@dataclass(frozen=True)
class Store:
    """Folders of indexes.  The first writable one is written, all are read."""

    folders: tuple[Path, ...]
    notes: list[str] = field(default_factory=list[str])
    """Receives the damaged files."""

    @classmethod
    def of(cls, config: DataConfig) -> "Store":
        """``cache_dir`` of the data JSON, and the user's cache folder in case it cannot be written."""
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return cls((Path(config.cache_dir or os.path.join(config.dataset_dir, CACHE_DIR)), Path(home) / "mm-data"))

    @property
    def folder(self) -> Path:
        """The first writable folder.  Raises UserError if there is none."""
        for folder in self.folders:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                if os.access(folder, os.W_OK | os.X_OK):
                    return folder
        raise UserError(f"the index of the samples cannot be written to {' or '.join(map(str, self.folders))}; set "
                        f"basic_parameters.cache_dir to a writable folder")

    def content_hash(self, file: RecordFile) -> str:
        """The hash of ``file``, which is read only if its size or times are new.  Raises UserError when it cannot be
        read."""
        status = os.stat(file.path)
        stamp = os.path.realpath(file.path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        name = f"files/{key_of(*stamp)}"
        for folder in self.folders:
            with self._noting():
                return Rows.open(str(folder / name), _BYTE).array.tobytes().decode()
        sha256 = file.content_hash()
        if time.time() - status.st_mtime > _SETTLED_SECONDS:
            self._write(name, sha256.encode())
        return sha256

    def making(self, key: str, what: str) -> AbstractContextManager[None]:
        """Lets only this process create the index ``key``; others wait.  Look again inside whether it exists now."""
        return making(self.folder / f"{key}.lock", what)

    def load(self, key: str, path: str) -> RecordIndex | None:
        """An index with its rows mapped into memory, for a file that is now at ``path``; None if there is none."""
        for folder in self.folders:
            with self._noting():
                found = json_object(Rows.open(str(folder / f"{key}.json"), _BYTE).array.tobytes())
                bad = tuple(BadSample(**{**one, "dataset": path}) for one in found["bad"])
                noted = {what: (count, first) for what, (count, first) in found["noted"].items()}
                rows = Rows.open(str(folder / f"{key}.rows"), ROW)
                return RecordIndex(rows, bad, noted, (), found["identity"])
        return None

    def save(self, key: str, index: RecordIndex) -> None:
        """Keep an index."""
        self._write(f"{key}.rows", index.rows.array)
        facts = {"bad": [asdict(one) for one in index.bad], "noted": index.noted, "identity": os.urandom(8).hex()}
        self._write(f"{key}.json", json.dumps(facts).encode())

    def numbers(self, facts: Any, choose: Callable[[], np.ndarray]) -> Rows:
        """The result of ``choose``, kept under the ``facts`` (JSON values) that it depends on."""
        name = f"{key_of(facts)}.numbers"
        for folder in self.folders:
            with self._noting():
                return Rows.open(str(folder / name), NUMBER)
        return Rows.open(self._write(name, choose()), NUMBER)

    def _write(self, name: str, content: Any) -> str:
        path = self.folder / name
        with writing(path, "cache_dir"):
            replace_file(path, lambda stream: stream.writelines([content, _crc32(content)]))
        return str(path)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Go on after a file that does not exist, or is damaged, which is noted."""
        try:
            yield
        except OSError:
            pass
        except ValueError as error:
            self.notes.append(f"{error}, and is created again")


def key_of(*facts: Any) -> str:
    """The name of what depends on these ``facts`` (JSON values)."""
    return hashlib.sha256(json.dumps([_FORM, ROW.descr, *facts]).encode()).hexdigest()[:32]


def _crc32(content: Any) -> bytes:
    return zlib.crc32(content).to_bytes(_CRC32_BYTES, "little")
