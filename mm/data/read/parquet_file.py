"""A Parquet file as a ``RecordFile``: each row is a record.  ``parquet`` reads the rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from mm.data.read import parquet
from mm.data.read.records import Raw, RecordBlock, RecordFile, Version, opened
from mm.data.read.spans import ByteSpan


@dataclass(frozen=True)
class ParquetFile(RecordFile):
    """A Parquet file.  A span is a record's row group and its row in that group."""

    path: str
    version: Version
    spans_are_bytes: ClassVar[bool] = False

    def blocks(self, problems: list[str]) -> Iterator[RecordBlock]:
        """See ``RecordFile``.  Adds no problems, because ``open_records`` has refused incomplete files."""
        self._check_version()
        first = 0
        for rows in parquet.blocks(self.path):
            yield RecordBlock(first, 0, 0, rows)
            first += len(rows)

    def read_block(self, block: RecordBlock) -> Iterator[Raw]:
        """See ``RecordFile``."""
        self._check_version()
        spans = [(int(group), int(row)) for group, row in block.spans]
        for number, value in enumerate(parquet.read(self.path, self.version, spans)):
            yield Raw(block.first_index + number, 0, spans[number], value)

    def read(self, span: ByteSpan) -> Any:
        """See ``RecordFile``."""
        self._check_version()
        return parquet.read(self.path, self.version, [span])[0]

    def line(self, span: ByteSpan) -> None:
        """None: a Parquet file has no lines.  Raises UserError when the file has changed."""
        self._check_version()

    def remarks(self) -> list[str]:
        """See ``RecordFile``."""
        return list(parquet.remarks(self.path, self.version))

    def _check_version(self) -> None:
        with opened(self.path, self.version):
            pass
