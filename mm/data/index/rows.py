"""A structured array in a ``.npy`` file that the processes of a node map into memory and share."""

import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from mm.errors import UserError
from mm.files import regular

BATCH_ROWS = 1 << 18
"""Rows processed at a time when all are needed: a few MB."""
_READ_BYTES = 1 << 24
_Stamp = tuple[int, int, int]
"""Inode, size in bytes and modification time in ns."""


class MappedRows:
    """The rows of a table, or the first ones.  Pickles as the path of the file if it has one."""

    def __init__(self, array: np.ndarray, path: str | None = None, crc32: int = 0, stamp: _Stamp | None = None) -> None:
        self._array, self.path, self.crc32, self._stamp = array, path, crc32, stamp

    @classmethod
    def open(cls, path: str, crc32: int, known: _Stamp | None = None) -> "MappedRows":
        """Map a file; its content is only read if its stamp is not ``known``.

        Raises OSError, and ValueError if the content does not match ``crc32``.
        """
        with open(path, "rb", opener=regular) as stream:
            stamp = _stamp_of(os.fstat(stream.fileno()))
            if stamp != known and _crc32(stream) != crc32:
                raise ValueError("its content does not match its checksum")
            stream.seek(0)
            if np.lib.format.read_magic(stream) != (1, 0):
                raise ValueError("another version of NumPy's format")
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
            if dtype.hasobject:
                raise ValueError("it holds objects")
            array = np.memmap(stream, dtype, "r", stream.tell(), shape)
            if _stamp_of(os.fstat(stream.fileno())) != stamp:
                raise ValueError("it has changed meanwhile")
        return cls(array, path, crc32, stamp)

    @property
    def array(self) -> np.ndarray:
        """The rows.  Raises UserError if another program has changed the file in place.

        A file that was deleted or replaced stays mapped as it was.
        """
        if self.path is not None and self._stamp is not None:
            with suppress(FileNotFoundError):
                now = _stamp_of(os.stat(self.path))
                if now != self._stamp and now[0] == self._stamp[0]:
                    raise _changed(self.path)
        return self._array

    def __len__(self) -> int:
        return len(self._array)

    def first(self, count: int) -> "MappedRows":
        """The first ``count`` rows."""
        return MappedRows(self._array[:count], self.path, self.crc32, self._stamp)

    def row(self, number: int) -> dict[str, int]:
        """One row by the names of its columns."""
        return dict(zip(self._array.dtype.names or (), self.array[number].item(), strict=True))

    def batches(self) -> Iterator[tuple[int, np.ndarray]]:
        """All rows in batches, each with the number of its first row."""
        for first in range(0, len(self), BATCH_ROWS):
            yield first, self.array[first : first + BATCH_ROWS]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_array": np.array(self._array) if self.path is None else len(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if (path := state["path"]) is not None:
            try:
                state = vars(MappedRows.open(path, state["crc32"], state["_stamp"]).first(state["_array"]))
            except (OSError, ValueError) as error:
                raise _changed(path) from error
        self.__dict__ = state


def _stamp_of(status: os.stat_result) -> _Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _changed(path: str) -> UserError:
    return UserError(f"{path}: this index of the samples was deleted or changed by another program after it was "
                     f"opened; start again: it will be rebuilt.")


def file_crc32(path: str | Path) -> int:
    """Checksum of a file.  Raises OSError."""
    with open(path, "rb", opener=regular) as stream:
        return _crc32(stream)


def _crc32(stream: IO[bytes]) -> int:
    """Checksum of the rest of a file, read in blocks: a map would count as memory of this process."""
    crc32 = 0
    while block := stream.read(_READ_BYTES):
        crc32 = zlib.crc32(block, crc32)
    return crc32
