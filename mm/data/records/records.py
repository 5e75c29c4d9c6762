"""Files of records: a JSON list, JSON Lines or Parquet, recognized by their first bytes, not by their names.

A file is read in place and in constant memory, a block of records or a single record at a time.  ``formats`` interprets
the records.

In Parquet each row is a record, and null counts as absent.  Hugging Face ``datasets`` writes images as structs of
``bytes`` and ``path``; a record only says where their bytes are, which are read when they are needed.  pyarrow is an
extra (``[parquet]``) and is imported only where such a file is read.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, BinaryIO, Literal

from mm.config.parse import not_utf8
from mm.data.sample import Inline, numbered, record_place
from mm.errors import UserError, collected
from mm.files import json_value, sha256

BLOCK_BYTES = 1 << 18
"""About this much of a file is read and passed on at a time: a few hundred records, a fraction of a second of work."""
_OTHER_FILES = (
    (b"PK\x03\x04", "a zip archive (or an xlsx table): unpack it, and name the file of records in it"),
    (b"\x1f\x8b", "a gzip file: unpack it with gunzip or tar -xzf, and name the file of records"),
    (b"ustar", "a tar archive: unpack it with tar -xf, and name the file that lists the samples (WebDataset's shards "
               "have none: write one record per sample)"),
    (b"(\xb5/\xfd", "a zstd file: unpack it with zstd -d, and name the file of records"),
    (b"ARROW1", "an Arrow file: save it with datasets' to_parquet or to_json"),
    (b"SQLite", "a database: export its table as JSON Lines"),
    (b"\x89PNG", "an image: name the file of records that refers to it"),
    (b"\xff\xd8\xff", "an image: name the file of records that refers to it"),
    (b"%PDF", "a PDF: render its pages as images, and write records that refer to them"),
)
"""What files begin with that people take for records, and what to do."""
_MAGIC_BYTES = 512
UTF8_MARK = b"\xef\xbb\xbf"
_MAX_RECORD_BYTES = 1 << 26
"""Limit for an element of a list: an unterminated string would be read to the end of the file."""
_PARQUET_START = b"PAR1"
_BLOCK_ROWS = 512
_MAX_GROUP_BYTES = 1 << 28
"""Size of a row group, uncompressed, above which a note warns."""
_HEAD_BYTES = 1 << 16
"""A text has no zero byte here, as binary and packed files have; a list begins here."""
_SPACE = re.compile(r"[ \t\r\n]*")
_AFTER = re.compile(r"[ \t\r\n]*([],])")
"""What follows an element of a list."""

_DECODER = json.JSONDecoder()

Version = tuple[int, int]
"""Size in bytes and modification time in ns.  A file with another version may have other contents."""
Span = tuple[int, int, int]
"""Where a record is: its first byte, its end, and its line, counted from 1; in Parquet its row group, row, and 0."""


@dataclass(frozen=True)
class RecordBlock:
    """Neighbouring records."""

    first_index: int
    """Index of the first one in the file, counted from 0."""
    spans: list[Span]


@dataclass(frozen=True)
class Raw:
    """One record: its value, or why it cannot be read."""

    index: int
    span: Span
    value: Any = None
    problem: str | None = None

    @property
    def line(self) -> int:
        """0 in Parquet."""
        return self.span[2]


@dataclass(frozen=True)
class RecordFile:
    """One version of a file of records.  Keeps no file open, so it pickles into data workers."""

    path: str
    version: Version
    kind: Literal["list", "lines", "Parquet"]

    def blocks(self, problems: list[str]) -> Iterator[RecordBlock]:
        """All records in file order.  If the file cannot be read to its end, the reason is added to ``problems``.

        Raises UserError when the file has changed.
        """
        find, first = {"list": _list_spans, "lines": _line_spans, "Parquet": _row_spans}[self.kind], 0
        with self._opened() as stream, collected(problems, self.path):
            if stream.read(len(UTF8_MARK)) != UTF8_MARK:
                stream.seek(0)
            for spans in find(stream):
                yield RecordBlock(first, spans)
                first += len(spans)

    def read_block(self, block: RecordBlock) -> Iterator[Raw]:
        """The records of a block.  Raises UserError when the file has changed."""
        first = block.spans[0][0]
        raw = b"" if self.kind == "Parquet" else self._bytes(first, block.spans[-1][1])
        for number, span in enumerate(block.spans):
            value = problem = None
            try:
                value = json_value(raw[span[0] - first : span[1] - first].decode()) if raw else self.read(span)
            except UserError:
                raise
            except UnicodeDecodeError as error:
                problem = f"{not_utf8(error)}."
            except ValueError as error:
                problem = f"not valid JSON: {error.msg if isinstance(error, json.JSONDecodeError) else error}."
            yield Raw(block.first_index + number, span, value, problem)

    def read(self, span: Span) -> Any:
        """The value of a record that was read without a problem before.  Raises UserError when the file has changed."""
        if self.kind == "Parquet":
            return _without_nulls(self.row(*span[:2]), _StoredImage(self, *span[:2]))
        return json.loads(self._bytes(*span[:2]))

    def row(self, group: int, row: int) -> Any:
        """A row in Parquet, with nulls and the bytes of images.  Reads its whole row group, and caches that."""
        import pyarrow

        with self._opened():
            pass
        try:
            return _row_group(self.path, self.version, group).slice(row, 1).to_pylist()[0]
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path}: row group {group} cannot be read: {error}.") from error

    def records(self, problems: list[str]) -> Iterator[Raw]:
        """All records in file order; ``problems`` and errors as in ``blocks``."""
        for block in self.blocks(problems):
            yield from self.read_block(block)

    def where(self, raw: Raw) -> str:
        """The place of a record for messages: ``file:line``, or ``file: record N`` in Parquet, which has no lines."""
        return f"{self.path}:{raw.line}" if raw.line else record_place(self.path, raw.index)

    def content_hash(self) -> str:
        """SHA-256 of all its bytes, as hexadecimal digits."""
        with self._opened() as stream:
            return sha256(stream)

    def remarks(self) -> list[str]:
        """A note if row groups are so large that reading single rows is slow and takes memory."""
        if self.kind != "Parquet":
            return []
        import pyarrow.parquet

        found = pyarrow.parquet.read_metadata(self.path)
        largest = max((found.row_group(group).total_byte_size for group in range(found.num_row_groups)), default=0)
        return [] if largest <= _MAX_GROUP_BYTES else [
            f"{self.path}: has a row group of {largest >> 20:,} MiB, and to reach an image its whole group is read; "
            f"write the file with smaller groups (row_group_size=100)"]

    def _bytes(self, start: int, end: int) -> bytes:
        with self._opened() as stream:
            stream.seek(start)
            return stream.read(end - start)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """Raises UserError when the file cannot be read, or no longer has this version."""
        try:
            with open(self.path, "rb") as stream:
                if _version_of(stream) != self.version:
                    raise UserError(f"{self.path}: has changed since this run checked it; start the run again, and "
                                    f"write changed data to a new file.")
                yield stream
        except OSError as error:
            raise UserError(f"{self.path}: can no longer be read: {error.strerror}.") from error


def open_records(path: str) -> RecordFile:
    """Open ``path``.  Raises UserError when it is not a readable regular file, or is binary or a damaged Parquet file.
    """
    if not os.path.isfile(path):
        raise UserError(f"{path}: is not a regular file; name JSON, JSONL or Parquet files in "
                        f"basic_parameters.dataset.")
    try:
        with open(path, "rb") as stream:
            version, start = _version_of(stream), stream.read(_HEAD_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    if start.startswith(_PARQUET_START):
        _check_parquet(path)
        return RecordFile(path, version, "Parquet")
    for magic, what in _OTHER_FILES:
        if magic in start[:_MAGIC_BYTES]:
            raise UserError(f"{path}: is {what}; expected JSON or JSON Lines in UTF-8, or Parquet.")
    if b"\0" in start:
        raise UserError(f"{path}: is a binary, packed or UTF-16 file; expected JSON or JSON Lines in UTF-8, or "
                        f"Parquet.")
    is_list = start.removeprefix(UTF8_MARK).lstrip().startswith(b"[")
    return RecordFile(path, version, "list" if is_list else "lines")


def _version_of(stream: BinaryIO) -> Version:
    status = os.fstat(stream.fileno())
    return status.st_size, status.st_mtime_ns


def _line_spans(stream: BinaryIO) -> Iterator[list[Span]]:
    """The non-blank lines."""
    start, line = stream.tell(), 0
    while lines := stream.readlines(BLOCK_BYTES):
        spans: list[Span] = []
        for text in lines:
            line += 1
            if text.strip():
                spans.append((start, start + len(text), line))
            start += len(text)
        if spans:
            yield spans


def _list_spans(stream: BinaryIO) -> Iterator[list[Span]]:
    """The elements of a list.  Raises UserError, whose message begins with ``:line``, where it is not one.

    Each character of the text stands for one byte: JSON's syntax is ASCII.
    """
    line, number, text, is_last = 1, 0, "", False
    while (space := stream.read(1)) != b"[":
        line += space == b"\n"
    offset = stream.tell()
    while not is_last:
        more = stream.read(max(BLOCK_BYTES, len(text)))
        if not more or len(text) > _MAX_RECORD_BYTES:
            raise UserError(_list_problem(text, line, number))
        text += more.decode("latin-1")
        found, rest, is_last = _elements(text, is_first=number == 0)
        spans, last = list[Span](), 0
        for start, end in found:
            line, last = line + text.count("\n", last, start), start
            spans.append((offset + start, offset + end, line))
        if spans:
            yield spans
        line += text.count("\n", last, rest)
        number, offset, text = number + len(spans), offset + rest, text[rest:]
    if text.strip() or stream.read(_HEAD_BYTES).strip():
        raise UserError(f":{line}: expected the end of the file after the ']' of the list.")


def _elements(text: str, is_first: bool) -> tuple[list[tuple[int, int]], int, bool]:
    """The complete elements at the beginning of ``text``, where the rest of it begins, and whether the list has ended.
    """
    found, rest = list[tuple[int, int]](), 0
    while True:
        start = _skipped(text, rest)
        if is_first and not found and text.startswith("]", start):
            return found, start + 1, True
        try:
            _, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):  # or the text is cut
            return found, rest, False
        after = _AFTER.match(text, end)
        if after is None:
            return found, rest, False
        found.append((start, end))
        rest = after.end()
        if after[1] == "]":
            return found, rest, True


def _list_problem(text: str, line: int, number: int) -> str:
    """Why the element ``number`` of a list, with which ``text`` begins in this line, is not one."""
    start = end = _skipped(text, 0)
    what = "expected ',' or ']' after it"
    try:
        _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        end, what = error.pos, error.msg + "; the file may be truncated" * (not text[error.pos :].strip())
    except RecursionError:
        what = "it is nested too deeply"
    except ValueError as error:  # a number of too many digits
        what = str(error)
    return f":{line + text.count(chr(10), 0, end)}: {numbered('record', number)}: not valid JSON: {what}."


def _skipped(text: str, position: int) -> int:
    """``position``, or the end of the whitespace there."""
    space = _SPACE.match(text, position)
    return space.end() if space else position


@dataclass(frozen=True)
class _StoredImage:
    """The place of an image in a row of a Parquet file."""

    file: RecordFile
    group: int
    row: int
    keys: tuple[str | int, ...] = ()
    """The keys and list indices that lead to it."""

    def inside(self, key: str | int) -> "_StoredImage":
        return replace(self, keys=(*self.keys, key))

    def read(self) -> bytes:
        """Raises UserError when the file can no longer be read, or has changed."""
        value = self.file.row(self.group, self.row)
        for key in self.keys:
            value = value[key]
        return value["bytes"]


def _without_nulls(value: Any, place: _StoredImage) -> Any:
    """``value``, which is at ``place``, without nulls: Parquet gives all structs of a column the same fields."""
    match value:
        case {"bytes": bytes(), "path": path} if len(value) == 2:
            return Inline(f"{path or '/'.join(map(str, place.keys))} (inside the record)", place)
        case {"bytes": None, "path": path} if len(value) == 2:
            return path
        case dict():
            return {key: _without_nulls(one, place.inside(key)) for key, one in value.items() if one is not None}
        case list():
            return [_without_nulls(one, place.inside(number)) for number, one in enumerate(value)]
        case _:
            return value


def _check_parquet(path: str) -> None:
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


def _row_spans(stream: BinaryIO) -> Iterator[list[Span]]:
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(stream)
    for group in range(metadata.num_row_groups):
        num_rows = metadata.row_group(group).num_rows
        for first in range(0, num_rows, _BLOCK_ROWS):
            yield [(group, row, 0) for row in range(first, min(num_rows, first + _BLOCK_ROWS))]


@lru_cache(maxsize=2)
def _row_group(path: str, version: Version, group: int) -> Any:
    """The table of a row group.  ``version`` is part of the cache key."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        return file.read_row_group(group)
