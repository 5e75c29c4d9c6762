"""Records of a Parquet file: each row is one record, and null counts as absent.

Hugging Face ``datasets`` writes images as ``{bytes, path}`` structs, in a column of these or of lists of these.  Their
bytes are not read with the record, which has an ``Embedded`` in place of each: it reads the bytes on demand, a few rows
at a time.  Images deeper in a record, as in a message's list of parts, are read with the record.

pyarrow is an extra (``[parquet]``) and is imported only where such a file is read.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np

from mm.data.read.records import Version, version_of, was_changed
from mm.data.sample import Inline
from mm.errors import UserError

BEGINNING = b"PAR1"
"""The first bytes of every Parquet file."""
_BLOCK_ROWS = 512
_STREAM_ROWS = 16
"""Rows whose images are in memory at the same time, per column."""
_BUFFER_BYTES = 1 << 20
_MAX_GROUP_BYTES = 1 << 28
"""Uncompressed images of a row group above which a note warns: reaching one means reading all before it in its group.
"""
_FIELDS = {"bytes", "path"}


@dataclass(frozen=True)
class _ImageColumn:
    """A column of ``{bytes, path}``, or of lists of these."""

    leaf: str
    """The dotted name of its ``bytes`` leaf in the file."""
    number: int
    """The column number of this leaf in a row group."""


@dataclass(frozen=True)
class _ColumnKinds:
    """How the records of a file are read."""

    images: Mapping[str, _ImageColumn]
    others: tuple[str, ...]
    """Dotted names of all leaves except the bytes of images."""


class Embedded(Inline):
    """An image embedded in a row.  Two are equal if they have the same place in the same file, so caches can compare
    them without reading them.  Pickles without its bytes."""

    _key: tuple[str, Version, int, int, str, int | None]

    def __init__(self, name: str, file: str, version: Version, group: int, row: int, column: str,
                 place: int | None) -> None:
        """``place``: the index in the row's list; None if the column has single images."""
        key = file, version, group, row, column, place
        self.__dict__.update(name=name, _key=key)  # the base is frozen

    @property
    def content(self) -> bytes:
        """Raises UserError when the file can no longer be read, or has changed."""
        file, version, group, row, column, place = self._key
        value = _stream(file, version, group, column).at(row)
        found = value if place is None else value[place]
        return found["bytes"]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Embedded) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        return Embedded, (self.name, *self._key)


def check(path: str) -> None:
    """Raises UserError when ``path`` is damaged, or pyarrow is not installed."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UserError(f"{path}: is a Parquet file, and the package pyarrow, which reads them, is not installed; "
                        f"install the extra [parquet], or write the records as JSONL.") from error
    try:
        pyarrow.parquet.ParquetFile(path).close()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not a complete Parquet file: {error}.") from error


def blocks(path: str) -> Iterator[np.ndarray]:
    """Blocks of neighbouring records: the row group and row of each, int64 [num_records, 2]."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    for group, size in enumerate(sizes):
        for first in range(0, size, _BLOCK_ROWS):
            rows = np.arange(first, min(size, first + _BLOCK_ROWS), dtype=np.int64)
            yield np.column_stack([np.full_like(rows, group), rows])


def remarks(path: str, version: Version) -> Iterator[str]:
    """A note if reading is slow because row groups are large."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        metadata = file.metadata
        sizes = {(name, group): metadata.row_group(group).column(one.number).total_uncompressed_size
                 for name, one in _columns(path, version).images.items() for group in range(metadata.num_row_groups)}
    (name, group), largest = max(sizes.items(), key=lambda item: item[1], default=(("", 0), 0))
    if largest > _MAX_GROUP_BYTES:
        yield (f"{path}: row group {group} has {largest >> 20:,} MiB in column {name!r}, and to reach an image all "
               f"before it in its group are read; write the file with smaller groups (row_group_size=100)")


def read(path: str, version: Version, spans: Sequence[tuple[int, int]]) -> list[Any]:
    """The records at these row groups and rows of this ``version`` of the file.

    Decodes the whole row group, except the bytes of images, and caches it for the next call.  So files whose rows are
    read in random order should have small row groups.

    Raises UserError when a row group cannot be read.
    """
    return [_record(path, version, group, row) for group, row in spans]


def _record(path: str, version: Version, group: int, row: int) -> Any:
    try:
        value = _row_group(path, version, group).slice(row, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: row {row} of row group {group} has text that is not UTF-8 ({error.reason}); the file "
                        f"is damaged: copy or download it again.") from error
    for column, images in _columns(path, version).images.items():
        place = path, version, group, row, column
        given = value[column]
        value[column] = ([_media(one, *place, number, images) for number, one in enumerate(given)]
                         if isinstance(given, list) else _media(given, *place, None, images))
    return _without_nulls(value)


def _media(value: Any, path: str, version: Version, group: int, row: int, column: str, place: int | None,
           images: _ImageColumn) -> "str | Embedded | None":
    """One image of a record: an ``Embedded`` if it has bytes, otherwise the path of its file."""
    if value is None:
        return None
    name = value["path"]
    num_nulls, num_values = _nulls(path, version, group, images.number)
    if num_nulls == num_values:
        return name
    if num_nulls != 0:  # some rows have bytes and others none, or the file does not say
        found = _stream(path, version, group, column).at(row)
        if (found if place is None else found[place])["bytes"] is None:
            return name
    where = f"column {column!r}" + ("" if place is None else f"[{place}]")
    return Embedded(f"{name} (inside the record)" if name else where, path, version, group, row, column, place)


@lru_cache(maxsize=16)
def _columns(path: str, version: Version) -> _ColumnKinds:
    import pyarrow as arrow
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        schema, leaves = file.schema_arrow, [file.schema.column(number).path for number in range(len(file.schema))]
    images: dict[str, _ImageColumn] = {}
    for field in schema:
        is_list = arrow.types.is_list(field.type) or arrow.types.is_large_list(field.type) or (
            arrow.types.is_fixed_size_list(field.type))
        kind = field.type.value_type if is_list else field.type
        if not arrow.types.is_struct(kind) or {one.name for one in kind} != _FIELDS:
            continue
        of_bytes = kind.field(kind.get_field_index("bytes")).type
        if not (arrow.types.is_binary(of_bytes) or arrow.types.is_large_binary(of_bytes)):
            continue
        number = next(number for number, leaf in enumerate(leaves)
                      if leaf.endswith(".bytes") and _field_of(leaf, schema.names) == field.name)
        images[field.name] = _ImageColumn(leaves[number], number)
    skipped = {one.number for one in images.values()}
    return _ColumnKinds(images, tuple(leaf for number, leaf in enumerate(leaves) if number not in skipped))


def _field_of(leaf: str, fields: Sequence[str]) -> str:
    """The field that a leaf with this dotted name is in.  A field's own name may have dots: ``observation.image``."""
    return max((name for name in fields if f"{leaf}.".startswith(f"{name}.")), key=len)


@lru_cache(maxsize=64)
def _nulls(path: str, version: Version, group: int, leaf: int) -> tuple[int | None, int]:
    """The number of nulls of a leaf, None if the file does not state it; and its number of values."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        column = file.metadata.row_group(group).column(leaf)
    statistics = column.statistics
    return (statistics.null_count if statistics is not None and statistics.has_null_count else None), column.num_values


@lru_cache(maxsize=2)
def _row_group(path: str, version: Version, group: int) -> Any:
    """The table of a row group without the bytes of images.  ``version`` is part of the cache key."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            return file.read_row_group(group, columns=list(_columns(path, version).others))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: row group {group} cannot be read: {error}.") from error


class _ImageStream:
    """The images of one column of a row group, a few rows at a time.  Later rows are reached by reading on, earlier
    ones by reading again from the beginning of the group."""

    def __init__(self, path: str, version: Version, group: int, column: str) -> None:
        self._path, self._version, self._group = path, version, group
        self._leaf = _columns(path, version).images[column].leaf
        self._lock = Lock()
        self._batches: Iterator[Any] = iter(())
        self._rows: Any = None
        self._first = self._end = 0

    def at(self, row: int) -> Any:
        """The value of a row.  Raises UserError when the file cannot be read, or has changed."""
        import pyarrow

        with self._lock:
            try:
                if row < self._first or self._rows is None:
                    self._begin()
                while row >= self._end:
                    batch = next(self._batches, None)
                    if batch is None:
                        raise pyarrow.ArrowInvalid(f"it has {self._end} rows, fewer than it states")
                    self._rows = batch.column(0)
                    self._first, self._end = self._end, self._end + len(self._rows)
            except (pyarrow.ArrowException, OSError) as error:
                self._rows = None
                raise UserError(f"{self._path}: row group {self._group} cannot be read: {error}.") from error
            assert self._rows is not None, "the loop has read the batch of this row"
            return self._rows[row - self._first].as_py()

    def _begin(self) -> None:
        import pyarrow.parquet

        if version_of(os.stat(self._path)) != self._version:
            raise was_changed(self._path)
        file = pyarrow.parquet.ParquetFile(self._path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        self._batches = file.iter_batches(_STREAM_ROWS, [self._group], [self._leaf], use_threads=False)
        self._first = self._end = 0


@lru_cache(maxsize=4)
def _stream(path: str, version: Version, group: int, column: str) -> _ImageStream:
    return _ImageStream(path, version, group, column)


def _without_nulls(value: Any) -> Any:
    """``value`` without nulls: Parquet gives all structs of a column the same fields, with nulls for absent ones."""
    match value:
        case {"bytes": bytes(content), "path": path} if len(value) == len(_FIELDS):
            return Inline(f"{path} (inside the record)" if path else "the image inside the record", content)
        case {"bytes": None, "path": path} if len(value) == len(_FIELDS):
            return path
        case dict():
            return {key: _without_nulls(one) for key, one in value.items() if one is not None}
        case list():
            return [_without_nulls(one) for one in value]
        case _:
            return value
