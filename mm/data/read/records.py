"""What every file of records is, whichever kind it is of: one version of a file, read a block or a record at a time.

The kinds are ``json_file`` and ``parquet_file``; ``open_records`` finds which of them a file is.  What a value means is
not known here.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, Protocol, cast

import numpy as np

from mm.data.read.spans import Span
from mm.data.record_name import record_place
from mm.errors import UserError

Version = tuple[int, int]
"""Size in bytes and time of the last change in ns: another version has other contents."""


@dataclass(frozen=True)
class Block:
    """Neighbouring records."""

    first_index: int
    """Index of the first one, from 0 within the file."""
    first_line: int
    """Line in which the first one begins, from 1; 0 in Parquet."""
    first_column: int
    """Where the first one begins in that line, in characters from 1; 0 in Parquet."""
    spans: np.ndarray
    """int64 [num_records, 2]: first byte and end, or row group and row."""


@dataclass(frozen=True)
class Raw:
    """One record of a block: its value, or why it has none."""

    index: int
    line: int
    """Line in which it begins, from 1; 0 in Parquet."""
    span: Span
    value: Any = None
    problem: str | None = None
    place: str = ""
    """What follows the name of the file: ``:line`` where it begins, or ``:line:column`` of the problem; in
    Parquet nothing."""


class RecordFile(Protocol):
    """A file of records in one version.  Pickles into data workers, because it holds no open file."""

    path: str
    version: Version
    spans_are_bytes: ClassVar[bool]
    """Whether spans are places in the file, so that they say how much of it has been read."""

    def blocks(self, problems: list[str]) -> Iterator[Block]:
        """All records in their order; a file that cannot be read to its end adds to ``problems``, with the line.

        Raises UserError when the file is no longer this version.
        """
        ...

    def read_block(self, block: Block) -> Iterator[Raw]:
        """The values of a block.  Raises UserError when the file is no longer this version."""
        ...

    def read(self, span: Span) -> Any:
        """The value of one record that was found good.  Raises UserError when the file is no longer this version."""
        ...

    def line(self, span: Span) -> int | None:
        """The line in which a record begins, from 1; None in a file without lines.

        Raises UserError when the file is no longer this version.
        """
        ...

    def remarks(self) -> list[str]:
        """What makes reading it slow."""
        ...

    def records(self, problems: list[str]) -> Iterator[Raw]:
        """Every record in its order; ``problems`` and errors are those of ``blocks``."""
        for block in self.blocks(problems):
            yield from self.read_block(block)

    def where(self, raw: Raw) -> str:
        """``file:line``; in Parquet, which has no lines, ``file: record N``."""
        return f"{self.path}{raw.place}" if raw.place else record_place(self.path, raw.index)

    def content_hash(self) -> str:
        """SHA-256 of all its bytes."""
        with opened(self.path, self.version) as stream:
            return hashlib.file_digest(cast(Any, stream), "sha256").hexdigest()


@contextmanager
def opened(path: str, version: Version) -> Iterator[BinaryIO]:
    """The file at ``path``.  Raises UserError when it cannot be read, or is no longer this ``version``."""
    try:
        with open(path, "rb") as stream:
            if version_of(os.fstat(stream.fileno())) != version:
                raise was_changed(path)
            yield stream
    except OSError as error:
        raise UserError(f"{path}: can no longer be read: {error.strerror}.") from error


def version_of(status: os.stat_result) -> Version:
    """The version of a file by its status."""
    return status.st_size, status.st_mtime_ns


def was_changed(path: str) -> UserError:
    """What to raise for a file that is no longer the version that was checked."""
    return UserError(f"{path}: was changed after this run had checked it; start the run again, and write changed data "
                     f"to a new file.")
