"""The interface of record files: one version of a file, read a block or a record at a time.

``json_file`` and ``parquet_file`` implement it; ``open_records`` picks the one for a file.  ``formats`` interprets the
records.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, Protocol

import numpy as np

from mm.data.read.spans import ByteSpan
from mm.data.record_name import record_place
from mm.errors import UserError
from mm.files import sha256

Version = tuple[int, int]
"""Size in bytes and modification time in ns.  A file with another version may have other contents."""


@dataclass(frozen=True)
class RecordBlock:
    """Neighbouring records."""

    first_index: int
    """Index of the first one in the file, counted from 0."""
    first_line: int
    """Line in which the first one begins, from 1; 0 in Parquet."""
    first_column: int
    """Where the first one begins in that line, in characters from 1; 0 in Parquet."""
    spans: np.ndarray
    """int64 [num_records, 2]: first byte and end, or row group and row."""


@dataclass(frozen=True)
class Raw:
    """One record of a block: its value, or why it cannot be read."""

    index: int
    line: int
    """Line in which it begins, from 1; 0 in Parquet."""
    span: ByteSpan
    value: Any = None
    problem: str | None = None
    place: str = ""
    """What messages append to the file's path: ``:line`` where it begins, or ``:line:column`` of the problem; empty in
    Parquet."""


class RecordFile(Protocol):
    """One version of a file of records.  Keeps no file open, so it pickles into data workers."""

    path: str
    version: Version
    spans_are_bytes: ClassVar[bool]
    """Whether spans are offsets in bytes, which show how much of the file has been read."""

    def blocks(self, problems: list[str]) -> Iterator[RecordBlock]:
        """All records in file order.  If the file cannot be read to its end, the reason is added to ``problems``, with
        the line.

        Raises UserError when the file has changed.
        """
        ...

    def read_block(self, block: RecordBlock) -> Iterator[Raw]:
        """The records of a block.  Raises UserError when the file has changed."""
        ...

    def read(self, span: ByteSpan) -> Any:
        """The value of a record that was read without a problem before.  Raises UserError when the file has changed."""
        ...

    def line(self, span: ByteSpan) -> int | None:
        """The line in which a record begins, counted from 1; None in a file without lines.

        Raises UserError when the file has changed.
        """
        ...

    def remarks(self) -> list[str]:
        """Notes about anything that makes the file slow to read."""
        ...

    def records(self, problems: list[str]) -> Iterator[Raw]:
        """All records in file order; ``problems`` and errors as in ``blocks``."""
        for block in self.blocks(problems):
            yield from self.read_block(block)

    def where(self, raw: Raw) -> str:
        """The place of a record for messages: ``file:line``, or ``file: record N`` in Parquet, which has no lines."""
        return f"{self.path}{raw.place}" if raw.place else record_place(self.path, raw.index)

    def content_hash(self) -> str:
        """SHA-256 of all its bytes, as hexadecimal digits."""
        with opened(self.path, self.version) as stream:
            return sha256(stream)


@contextmanager
def opened(path: str, version: Version) -> Iterator[BinaryIO]:
    """Open ``path`` for reading.  Raises UserError when it cannot be read, or no longer has this ``version``."""
    try:
        with open(path, "rb") as stream:
            if version_of(os.fstat(stream.fileno())) != version:
                raise was_changed(path)
            yield stream
    except OSError as error:
        raise UserError(f"{path}: can no longer be read: {error.strerror}.") from error


def version_of(status: os.stat_result) -> Version:
    """The version of a file with this status."""
    return status.st_size, status.st_mtime_ns


def was_changed(path: str) -> UserError:
    """The error for a file that changed after it was checked."""
    return UserError(f"{path}: has changed since this run checked it; start the run again, and write changed data to a "
                     f"new file.")
