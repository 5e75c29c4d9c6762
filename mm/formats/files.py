"""The open files of one directory: reads, writes, checksums and comparisons of stored tensors."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import Self

from mm.errors import UserError
from mm.formats.manifest import MANIFEST_FILE
from mm.weights.cut import Span
from mm.weights.plan import Stretch, ViewIndex
from mm.weights.views import Stored, View

BUFFER_BYTES = 1 << 18
"""Size of one read or write.  It fits a second-level cache; 4 MiB took twice as long."""


class Files:
    """The open files of one directory.  Each thread needs its own, because readahead is per open file."""

    def __init__(self, directory: Path, flags: int = os.O_RDONLY) -> None:
        self.directory = directory
        self._flags = flags
        self._descriptors: dict[str, int] = {}

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self.directory / file, self._flags)
        return self._descriptors[file]

    def read(self, stored: Stored, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a tensor, beginning at ``start``."""
        done = 0
        while done < len(into):
            num_bytes = os.preadv(self._descriptor(stored.file), [into[done:]], stored.offset + start + done)
            if num_bytes == 0:
                raise UserError(
                    f"{self.directory / stored.file} ends within {stored.name}; the file was truncated during reading."
                )
            done += num_bytes

    def write(self, stored: Stored, start: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor(stored.file), data[done:], stored.offset + start + done)

    def read_columns(self, view: View, rows: range, indices: range) -> bytearray:
        """Read only ``indices`` of ``rows`` of a stored tensor."""
        size, width, first = (number * view.unit_bytes for number in (len(indices), view.num_indices, indices.start))
        content = bytearray(len(rows) * size)
        # Whole rows are contiguous, so they take one read.
        num_reads = 1 if size == width else len(rows)
        size *= len(rows) // num_reads
        for number, row in enumerate(rows[:num_reads]):
            into = memoryview(content)[number * size : (number + 1) * size]
            self.read(view.stored, row * width + first, into)
        return content

    def tensor(self, view: View, rows: range, indices: range) -> Tensor:
        """[row, index, place] of a stored tensor, in new memory."""
        content = self.read_columns(view, rows, indices)
        return torch.frombuffer(content, dtype=view.stored.dtype).view(len(rows), len(indices), -1)

    def block(self, index: ViewIndex, key: str, rows: range, indices: range) -> Tensor:
        """[row, index, place] of the Hugging Face tensor ``key`` as stored, without verifying checksums.

        ``indices`` are along the cut dimension, ``rows`` along the dimensions before it, places along those after it.
        The views of ``index`` must hold all of them, in one dtype, in files of this directory.
        """
        found = index.find(Span(key, indices.start, len(indices)))
        blocks = [self.tensor(one.view, rows, range(one.start, one.stop)) for one in found]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)

    def crc32(self, stored: Stored) -> int:
        """Checksum of a tensor's bytes."""
        crc32 = 0
        for block in self._blocks(stored):
            crc32 = zlib.crc32(block, crc32)
        return crc32

    def check(self, stored: Stored, advice: str) -> None:
        """Raise UserError if a tensor has a checksum and its bytes do not match; ``advice`` ends the message."""
        if stored.crc32 is not None:
            self.compare(stored, self.crc32(stored), advice)

    def compare(self, stored: Stored, crc32: int, advice: str) -> None:
        """Raise UserError if a tensor has a checksum other than ``crc32``, that of the bytes read."""
        if stored.crc32 not in (None, crc32):
            raise UserError(f"{self.directory / stored.file}: {stored.name} is damaged (its crc32 differs from "
                            f"{MANIFEST_FILE}); {advice}.")

    def read_checked(self, stored: Stored, advice: str) -> bytearray:
        """Read the bytes of a tensor and verify its checksum in one pass, while they are in the processor's cache."""
        content = bytearray(stored.num_bytes)
        crc32 = 0
        for start in range(0, len(content), BUFFER_BYTES):
            block = memoryview(content)[start : start + BUFFER_BYTES]
            self.read(stored, start, block)
            crc32 = zlib.crc32(block, crc32)
        self.compare(stored, crc32, advice)
        return content

    def are_equal(self, one: Stored, other: Stored) -> bool:
        """Whether dtype, shape and every bit are equal."""
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return all(a == b for a, b in zip(self._blocks(one), self._blocks(other), strict=True))

    def is_zero(self, stretch: Stretch) -> bool:
        """Whether every byte of ``stretch`` is zero."""
        blocks = stretch.view.blocks(range(stretch.start, stretch.stop), BUFFER_BYTES)
        return not any(any(self.read_columns(stretch.view, rows, indices)) for rows, indices in blocks)

    def _blocks(self, stored: Stored) -> Iterator[memoryview]:
        """The bytes of a tensor in order; the next block overwrites the previous one."""
        buffer = memoryview(bytearray(min(BUFFER_BYTES, stored.num_bytes)))
        for start in range(0, stored.num_bytes, BUFFER_BYTES):
            block = buffer[: stored.num_bytes - start]
            self.read(stored, start, block)
            yield block

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
