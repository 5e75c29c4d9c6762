"""Records of a Parquet file, a row each; ``parquet`` reads them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from mm.data.read import parquet
from mm.data.read.records import Block, Raw, RecordFile, Version, opened
from mm.data.read.spans import Span


@dataclass(frozen=True)
class ParquetFile(RecordFile):
    """A Parquet file.  A span is the row group of a record and its row there."""

    path: str
    version: Version
    spans_are_bytes: ClassVar[bool] = False

    def blocks(self, problems: list[str]) -> Iterator[Block]:
        """All records in their order; ``open_records`` has found the file whole."""
        first = 0
        for rows in parquet.blocks(self.path):
            yield Block(first, 0, 0, rows)
            first += len(rows)

    def read_block(self, block: Block) -> Iterator[Raw]:
        """The values of a block."""
        spans = [(int(group), int(row)) for group, row in block.spans]
        for number, value in enumerate(parquet.read(self.path, self.version, spans)):
            yield Raw(block.first_index + number, 0, spans[number], value)

    def read(self, span: Span) -> Any:
        """The value of one record that was found good."""
        self._check_version()
        return parquet.read(self.path, self.version, [span])[0]

    def line(self, span: Span) -> None:
        """None: a Parquet file has no lines."""
        self._check_version()

    def remarks(self) -> list[str]:
        """What makes reading it slow."""
        return list(parquet.remarks(self.path, self.version))

    def _check_version(self) -> None:
        with opened(self.path, self.version):
            pass
