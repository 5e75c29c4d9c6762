"""The raw values of a JSON list, JSONL or Parquet file, read a block or a record at a time.

What a file holds is seen from its first bytes, not from its name.  What a value means is not known here.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, BinaryIO, cast

import numpy as np

from mm.data.read import parquet
from mm.data.read.spans import BLOCK_BYTES, UTF8_MARK, Span, line_spans, list_spans, not_utf8, num_characters
from mm.data.record_name import record_place
from mm.errors import UserError

_OTHER_BEGINNINGS = {
    b"\x1f\x8b": "is compressed (gzip); unpack it, because its records are read in any order",
    b"\xff\xfe": "is in UTF-16; save it as UTF-8",
    b"\xfe\xff": "is in UTF-16; save it as UTF-8",
}

Version = tuple[int, int]
"""Size in bytes and time of the last change in ns: another version has other contents."""


_LINES_AT_A_TIME_BYTES = 1 << 24
"""That are looked through for the number of a line."""


class Form(Enum):
    """How a file holds its records."""

    LIST = "a JSON list"
    LINES = "JSONL"
    PARQUET = "Parquet"


@dataclass(frozen=True)
class Block:
    """Neighbouring records."""

    first_index: int
    """Of the first one, from 0 within the file."""
    first_line: int
    """Where the first one begins, from 1; of Parquet 0."""
    first_column: int
    """Where in that line, in characters from 1; of Parquet 0."""
    spans: np.ndarray
    """int64 [num_records, 2]: first byte and end, or row group and row."""


@dataclass(frozen=True)
class Raw:
    """One record of a block: its value, or why it has none."""

    index: int
    line: int
    """Where it begins, from 1; of Parquet 0."""
    span: Span
    value: Any = None
    problem: str | None = None
    place: str = ""
    """What follows the name of the file: ``:line`` where it begins, or ``:line:column`` of the problem; of Parquet
    nothing."""


@dataclass(frozen=True)
class RecordFile:
    """A file of records in one version."""

    path: str
    version: Version
    form: Form

    @classmethod
    def open(cls, path: str) -> "RecordFile":
        """Look at the beginning.  Raises UserError when ``path`` is no readable regular file, or of another kind."""
        if not os.path.isfile(path):
            raise UserError(f"{path}: is no regular file; name JSON, JSONL or Parquet files in "
                            f"basic_parameters.dataset.")
        try:
            with open(path, "rb") as stream:
                version, start = _version(stream), stream.read(BLOCK_BYTES)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
        for beginning, what in _OTHER_BEGINNINGS.items():
            if start.startswith(beginning):
                raise UserError(f"{path}: {what}.")
        if start.startswith(parquet.BEGINNING):
            parquet.check(path)
            return cls(path, version, Form.PARQUET)
        is_list = start.removeprefix(UTF8_MARK).lstrip(b" \t\r\n").startswith(b"[")
        return cls(path, version, Form.LIST if is_list else Form.LINES)

    def blocks(self, problems: list[str]) -> Iterator[Block]:
        """All records in their order; a file that cannot be read to its end adds to ``problems``, with the line.

        Raises UserError when the file is no longer this version.
        """
        first = 0
        if self.form is Form.PARQUET:
            for rows in parquet.blocks(self.path):
                yield Block(first, 0, 0, rows)
                first += len(rows)
            return
        with self._opened() as stream:
            find = list_spans if self.form is Form.LIST else line_spans
            for line, column, spans in find(stream, self.path, problems):
                yield Block(first, line, column, np.array(spans, dtype=np.int64))
                first += len(spans)

    def read_block(self, block: Block) -> Iterator[Raw]:
        """The values of a block.  Raises UserError when the file is no longer this version."""
        spans = [(int(start), int(end)) for start, end in block.spans]
        if self.form is Form.PARQUET:
            for number, value in enumerate(parquet.read(self.path, self.version, spans)):
                yield Raw(block.first_index + number, 0, spans[number], value)
            return
        first = spans[0][0]
        raw = self._bytes(first, spans[-1][1])
        line, counted = block.first_line, 0
        for number, (start, end) in enumerate(spans):
            begin = start - first
            line, counted = line + raw.count(b"\n", counted, begin), begin
            value, problem, place = None, None, f":{line}"
            try:
                value = _decoded(raw[begin : end - first])
            except (ValueError, RecursionError) as error:
                newline = raw.rfind(b"\n", 0, begin)
                column = num_characters(raw[newline + 1 : begin]) + (1 if newline >= 0 else block.first_column)
                place, problem = _explained(error, line, column)
            yield Raw(block.first_index + number, line, (start, end), value, problem, place)

    def records(self, problems: list[str]) -> Iterator[Raw]:
        """Every record in its order; ``problems`` and errors are those of ``blocks``."""
        for block in self.blocks(problems):
            yield from self.read_block(block)

    def where(self, raw: Raw) -> str:
        """``file:line``; in Parquet, which has no lines, ``file: record N``."""
        return f"{self.path}{raw.place}" if raw.place else record_place(self.path, raw.index)

    def read(self, span: Span) -> Any:
        """The value of one record that was found good.  Raises UserError when the file is no longer this version."""
        if self.form is Form.PARQUET:
            self._bytes(0, 0)  # looks at the version
            return parquet.read(self.path, self.version, [span])[0]
        return json.loads(self._bytes(*span))

    def line(self, span: Span) -> int | None:
        """Where a record begins, from 1; None in Parquet, which has no lines."""
        if self.form is Form.PARQUET:
            self._bytes(0, 0)  # looks at the version
            return None
        size = _LINES_AT_A_TIME_BYTES
        parts = (self._bytes(start, min(start + size, span[0])) for start in range(0, span[0], size))
        return 1 + sum(part.count(b"\n") for part in parts)

    def remarks(self) -> list[str]:
        """What makes reading it slow."""
        return [*parquet.remarks(self.path, self.version)] if self.form is Form.PARQUET else []

    def content_hash(self) -> str:
        """Of all its bytes."""
        with self._opened() as stream:
            return hashlib.file_digest(cast(Any, stream), "sha256").hexdigest()

    def _bytes(self, start: int, end: int) -> bytes:
        with self._opened() as stream:
            stream.seek(start)
            return stream.read(end - start)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """Raises UserError when the file cannot be read, or is no longer this version."""
        try:
            with open(self.path, "rb") as stream:
                if _version(stream) != self.version:
                    raise UserError(
                        f"{self.path}: was changed after this run had checked it; start the run again, and write "
                        f"changed data to a new file."
                    )
                yield stream
        except OSError as error:
            raise UserError(f"{self.path}: can no longer be read: {error.strerror}.") from error


def _version(stream: BinaryIO) -> Version:
    status = os.fstat(stream.fileno())
    return status.st_size, status.st_mtime_ns


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, refusing the repeated keys that ``json`` would drop without a word."""
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)


def _decoded(raw: bytes) -> Any:
    """The value; raises ValueError and RecursionError, of which ``_explained`` makes a sentence."""
    return _DECODER.decode(raw.decode())


def _explained(error: Exception, line: int, column: int) -> tuple[str, str]:
    """The place of a problem in a record that begins at this line and column, and what it is."""
    match error:
        case UnicodeDecodeError():
            num_before = error.object.count(b"\n", 0, error.start)
            return f":{line + num_before}", not_utf8(error)
        case json.JSONDecodeError():
            near = error.doc[max(0, error.pos - 30) : error.pos + 10]
            place = f":{line + error.lineno - 1}:{error.colno + (column - 1) * (error.lineno == 1)}"
            return place, f"not valid JSON: {error.msg}, near {near!r}."
        case RecursionError():
            return f":{line}", "not valid JSON: it is nested too deeply."
        case _:
            return f":{line}", f"not valid JSON: {error}."
