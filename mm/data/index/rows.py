"""The rows of an index, packed by column into a few bytes per number, in one file that the processes of a node map and
share.

A number is stored as its offset from the minimum of its column among ``_BLOCK_ROWS`` neighbours, in the fewest bytes
that fit all offsets of the column.  A column takes memory only where it is read.
"""

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

import numpy as np

from mm.errors import UserError

_BLOCK_ROWS = 4096
BATCH_ROWS = 64 * _BLOCK_ROWS
"""Rows processed at a time when all are needed: a few MB."""
_PAGE_BYTES = 4096
"""In long tables, a column starts at a page boundary and shares no page with another."""
_WIDTHS = (0, 1, 2, 3, 4, 8)
"""Allowed sizes of a number in bytes."""


class MappedBytes:
    """Bytes of a file, mapped into memory.  Pickles as the path of the file if it has one."""

    def __init__(self, content: np.ndarray, path: str | None = None) -> None:
        """``content``: uint8."""
        self.content, self.path = content, path

    @classmethod
    def map(cls, file: IO[bytes], path: str | None = None) -> "MappedBytes":
        """Map an open file, which may be closed afterwards; ``path`` is its path for other processes.

        Raises OSError.
        """
        size = os.stat(file.fileno()).st_size
        content = np.memmap(file, np.uint8, "r") if size else np.empty(0, np.uint8)  # an empty file cannot be mapped
        return cls(content, path)

    def __getstate__(self) -> tuple[np.ndarray | None, str | None]:
        return (np.array(self.content) if self.path is None else None), self.path

    def __setstate__(self, state: tuple[np.ndarray | None, str | None]) -> None:
        content, self.path = state
        if content is None:
            assert self.path is not None
            try:
                with open(self.path, "rb") as file:
                    content = MappedBytes.map(file).content
            except OSError as error:
                raise UserError(f"{self.path}: this index of the samples was deleted; start again.") from error
        self.content = content


@dataclass(frozen=True)
class Column:
    """How a column is stored: the minimum of each block as int64, then ``width`` bytes per row, little-endian."""

    name: str
    dtype: str
    """The dtype in which its numbers are returned."""
    of: str
    """The column that its numbers are relative to; "" for none."""
    unit: int
    """All offsets from a block's minimum are multiples of this."""
    width: int
    lows_at: int
    at: int


@dataclass(frozen=True)
class IndexRows:
    """All rows of a packed table, or the first ones."""

    piece: MappedBytes
    columns: tuple[Column, ...]
    num_packed: int
    """Rows in the table."""
    num_rows: int

    def __len__(self) -> int:
        return self.num_rows

    def first(self, count: int) -> "IndexRows":
        """The first ``count`` rows."""
        return IndexRows(self.piece, self.columns, self.num_packed, min(count, self.num_rows))

    def row(self, number: int) -> "IndexRow":
        """One row; its numbers are read on access."""
        assert 0 <= number < self.num_rows
        return IndexRow(self, number)

    def at(self, name: str, number: int) -> int:
        """One number."""
        column, content = self._named(name), self.piece.content
        low, place = column.lows_at + 8 * (number // _BLOCK_ROWS), column.at + number * column.width
        above = int.from_bytes(content[place : place + column.width].tobytes(), "little")
        least = int.from_bytes(content[low : low + 8].tobytes(), "little", signed=True)
        return least + column.unit * above + (self.at(column.of, number) if column.of else 0)

    def of(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """One column of the rows ``numbers``, in their order, loaded into memory."""
        if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1 and (np.diff(numbers) == 1).all():
            return self.between(name, int(numbers[0]), int(numbers[-1]) + 1)
        column = self._named(name)
        lows, packed = self._lows_and_packed(column)
        values = lows[numbers // _BLOCK_ROWS]
        if column.width:
            values += column.unit * _unpacked(packed[numbers])
        if column.of:
            values += self.of(column.of, numbers)
        return values.astype(column.dtype)

    def between(self, name: str, first: int, last: int) -> np.ndarray:
        """One column of the rows ``first`` to ``last`` - 1, loaded into memory; faster than ``of``."""
        column = self._named(name)
        assert 0 <= first <= last <= self.num_rows
        lows, packed = self._lows_and_packed(column)
        block = first // _BLOCK_ROWS
        values = lows[block : -(-last // _BLOCK_ROWS)].repeat(_BLOCK_ROWS)
        values = values[first - block * _BLOCK_ROWS : last - block * _BLOCK_ROWS]
        if column.width:
            values += column.unit * _unpacked(packed[first:last])
        if column.of:
            values += self.between(column.of, first, last)
        return values.astype(column.dtype)

    def batches(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """One column in batches: the number of the first row of each batch, and its values."""
        for first in range(0, self.num_rows, BATCH_ROWS):
            yield first, self.between(name, first, min(first + BATCH_ROWS, self.num_rows))

    def _named(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def _lows_and_packed(self, column: Column) -> tuple[np.ndarray, np.ndarray]:
        """The minimum of each block, and the offset of each row: uint8 [num_packed, width]."""
        content, end = self.piece.content, column.at + self.num_packed * column.width
        lows = content[column.lows_at : column.lows_at + 8 * -(-self.num_packed // _BLOCK_ROWS)]
        return lows.view("<i8"), content[column.at : end].reshape(self.num_packed, column.width)


class IndexRow:
    """One row.  Numbers are read on access, so unused columns take no memory."""

    def __init__(self, rows: IndexRows, number: int) -> None:
        self._rows, self._number = rows, number

    def __getitem__(self, name: str) -> int:
        return self._rows.at(name, self._number)


def _unpacked(packed: np.ndarray) -> np.ndarray:
    """int64 [num], from uint8 [num, width]."""
    width = packed.shape[1]
    if width == 3:
        wide = np.zeros((len(packed), 4), dtype=np.uint8)
        wide[:, :3] = packed
        return wide.view("<u4").reshape(-1).astype(np.int64)
    return np.ascontiguousarray(packed).view(f"<u{width}").reshape(-1).astype(np.int64)


def packed_numbers(numbers: np.ndarray, folder: str | None) -> IndexRows:
    """Rows with the single column ``number``, in an unnamed file in ``folder``."""
    with tempfile.TemporaryFile(dir=folder) as unpacked, tempfile.TemporaryFile(dir=folder) as target:
        numbers.tofile(unpacked)
        return packed(unpacked, np.dtype([("number", numbers.dtype.str)]), len(numbers), target)


class _Packing:
    """Statistics of one column, gathered before it is written."""

    def __init__(self, name: str, of: str, num_blocks: int) -> None:
        self.name, self.of, self.unit, self.largest = name, of, 0, 0
        self.lows = np.zeros(num_blocks, dtype="<i8")

    def values(self, rows: np.ndarray) -> np.ndarray:
        values = rows[self.name].astype(np.int64)
        return values - rows[self.of] if self.of else values

    def add(self, first: int, rows: np.ndarray) -> None:
        values = self.values(rows)
        least = np.minimum.reduceat(values, np.arange(0, len(rows), _BLOCK_ROWS))
        self.lows[first // _BLOCK_ROWS :][: len(least)] = least
        above = values - least.repeat(_BLOCK_ROWS)[: len(rows)]
        self.largest = max(self.largest, int(above.max()))
        if self.unit != 1:
            self.unit = math.gcd(self.unit, int(np.gcd.reduce(above)))

    def column(self, dtype: str, lows_at: int, at: int) -> Column:
        unit = max(1, self.unit)
        width = next(width for width in _WIDTHS if self.largest // unit < 1 << 8 * width)
        return Column(self.name, dtype, self.of, unit, width, lows_at, at)

    def bytes_of(self, column: Column, first: int, rows: np.ndarray) -> bytes:
        block = first // _BLOCK_ROWS
        least = self.lows[block : block - (-len(rows) // _BLOCK_ROWS)].repeat(_BLOCK_ROWS)[: len(rows)]
        above = (self.values(rows) - least) // column.unit
        return above.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : column.width].tobytes()


def packed(
    unpacked: IO[bytes], dtype: np.dtype, num_rows: int, target: IO[bytes],
    counted_from: Mapping[str, str] | None = None,
) -> IndexRows:
    """Pack the ``num_rows`` rows of ``dtype`` (integers) in the file ``unpacked`` into the empty file ``target``, and
    map that.  Only a few MB are in memory at a time.

    ``counted_from`` maps a column to one with similar values, to which it is stored relative, such as end to start.
    """
    num_blocks = -(-num_rows // _BLOCK_ROWS)
    found = [_Packing(name, (counted_from or {}).get(name, ""), num_blocks) for name in dtype.names or ()]
    for first, rows in _batches(unpacked, dtype, num_rows):
        for one in found:
            one.add(first, rows)
    columns, place, align = [], 0, _PAGE_BYTES if num_blocks > 1 else 8
    for one in found:
        columns.append(one.column(dtype[one.name].str, place, _next(place + 8 * num_blocks, align)))
        place = _next(columns[-1].at + num_rows * columns[-1].width, align)
    target.truncate(place)
    for one, column in zip(found, columns, strict=True):
        target.seek(column.lows_at)
        target.write(one.lows.tobytes())
    for first, rows in _batches(unpacked, dtype, num_rows):
        for one, column in zip(found, columns, strict=True):
            target.seek(column.at + first * column.width)
            target.write(one.bytes_of(column, first, rows) if column.width else b"")
    target.flush()
    return IndexRows(MappedBytes.map(target), tuple(columns), num_rows, num_rows)


def _next(place: int, align: int) -> int:
    """Round ``place`` up to a multiple of ``align``."""
    return -(-place // align) * align


def _batches(unpacked: IO[bytes], dtype: np.dtype, num_rows: int) -> Iterator[tuple[int, np.ndarray]]:
    unpacked.seek(0)
    for first in range(0, num_rows, BATCH_ROWS):
        count = min(BATCH_ROWS, num_rows - first)
        yield first, np.frombuffer(unpacked.read(count * dtype.itemsize), dtype)
