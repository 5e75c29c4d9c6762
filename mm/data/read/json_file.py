"""Records in a JSON file: the elements of one list, or JSON Lines.

The two kinds differ only in how the positions of records are found.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import numpy as np

from mm.data.read.records import Raw, RecordBlock, RecordFile, Version, opened
from mm.data.read.spans import ByteSpan, FoundRecords, not_utf8, num_characters
from mm.data.record_name import wrong_character

_LINES_AT_A_TIME_BYTES = 1 << 24
"""Bytes read at a time to count lines."""


@dataclass(frozen=True)
class JsonFile(RecordFile):
    """A JSON list or JSON Lines.  A span is the first byte of a record and its end."""

    path: str
    version: Version
    find: Callable[[BinaryIO, str, list[str]], Iterator[FoundRecords]]
    """Finds the positions of the records: ``list_spans`` or ``line_spans``."""
    spans_are_bytes: ClassVar[bool] = True

    def blocks(self, problems: list[str]) -> Iterator[RecordBlock]:
        """See ``RecordFile``."""
        first = 0
        with opened(self.path, self.version) as stream:
            for line, column, spans in self.find(stream, self.path, problems):
                yield RecordBlock(first, line, column, np.array(spans, dtype=np.int64))
                first += len(spans)

    def read_block(self, block: RecordBlock) -> Iterator[Raw]:
        """See ``RecordFile``."""
        spans = [(int(start), int(end)) for start, end in block.spans]
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

    def read(self, span: ByteSpan) -> Any:
        """See ``RecordFile``."""
        return json.loads(self._bytes(*span))

    def line(self, span: ByteSpan) -> int:
        """See ``RecordFile``; counts the lines before the record."""
        size = _LINES_AT_A_TIME_BYTES
        blocks = (self._bytes(start, min(start + size, span[0])) for start in range(0, span[0], size))
        return 1 + sum(block.count(b"\n") for block in blocks)

    def remarks(self) -> list[str]:
        """None: every record can be read directly."""
        return []

    def _bytes(self, start: int, end: int) -> bytes:
        with opened(self.path, self.version) as stream:
            stream.seek(start)
            return stream.read(end - start)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object.  Raises ValueError for a repeated key, where ``json`` silently keeps the last value."""
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice in one object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)


def _decoded(raw: bytes) -> Any:
    """The value.  Raises ValueError and RecursionError; ``_explained`` turns them into messages."""
    return _DECODER.decode(raw.decode())


def _explained(error: Exception, line: int, column: int) -> tuple[str, str]:
    """The place and the message of an error in a record that begins at this line and column."""
    match error:
        case UnicodeDecodeError():
            num_before = error.object.count(b"\n", 0, error.start)
            return f":{line + num_before}", not_utf8(error)
        case json.JSONDecodeError():
            place = f":{line + error.lineno - 1}:{error.colno + (column - 1) * (error.lineno == 1)}"
            return place, f"not valid JSON: {error.msg}, {wrong_character(error.doc, error.pos)}."
        case RecursionError():
            return f":{line}", "not valid JSON: it is nested too deeply."
        case _:
            return f":{line}", f"not valid JSON: {error}."
