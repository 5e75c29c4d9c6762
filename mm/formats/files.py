"""The open files of one directory: exact reads and writes of stored tensors, and what is asked of their bytes."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from mm.errors import UserError
from mm.formats.manifest import MANIFEST_FILE
from mm.weights.cut import Span
from mm.weights.plan import Index, Stretch
from mm.weights.views import Stored, View

BUFFER_BYTES = 1 << 18
"""Size of one read or write: fits a second-level cache, where 4 MiB took twice the time."""


class Files:
    """The open files of one directory.  For one thread: readahead is per open file."""

    def __init__(self, directory: Path, flags: int = os.O_RDONLY) -> None:
        self.directory = directory
        self._flags = flags
        self._descriptors: dict[str, int] = {}

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self.directory / file, self._flags)
        return self._descriptors[file]

    def read(self, stored: Stored, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a tensor from ``start`` on."""
        done = 0
        while done < len(into):
            num_bytes = os.preadv(self._descriptor(stored.file), [into[done:]], stored.offset + start + done)
            if num_bytes == 0:
                raise UserError(
                    f"{self.directory / stored.file} ends within {stored.name}; it became shorter while it was read."
                )
            done += num_bytes

    def write(self, stored: Stored, start: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor(stored.file), data[done:], stored.offset + start + done)

    def read_columns(self, view: View, rows: range, indices: range) -> bytearray:
        """Some indices of some rows of a stored tensor; only these are read."""
        size, width, first = (number * view.unit_bytes for number in (len(indices), view.num_indices, indices.start))
        content = bytearray(len(rows) * size)
        # Whole rows lie one after the other.
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

    def block(self, index: Index, key: str, rows: range, indices: range) -> Tensor:
        """[row, index, place] of the Hugging Face tensor ``key`` as it is stored, without looking at checksums.

        ``indices`` lie along the dimension that is cut, ``rows`` in those before it, places in those after it.  The
        views of ``index`` must hold all of them, in one dtype, in files of this directory.
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

    def check(self, stored: Stored, mend: str) -> None:
        """Refuse a tensor that is not what its checksum, if it has one, says; ``mend`` ends the message."""
        if stored.crc32 is not None:
            self.compare(stored, self.crc32(stored), mend)

    def compare(self, stored: Stored, crc32: int, mend: str) -> None:
        """Refuse a tensor whose bytes had the checksum ``crc32`` when they were read, if another one is stated."""
        if stored.crc32 not in (None, crc32):
            raise UserError(f"{self.directory / stored.file}: {stored.name} is damaged (its crc32 differs from "
                            f"{MANIFEST_FILE}); {mend}.")

    def read_checked(self, stored: Stored, mend: str) -> bytearray:
        """The bytes of a tensor, read once and checked while they pass through the processor's cache."""
        content = bytearray(stored.num_bytes)
        crc32 = 0
        for start in range(0, len(content), BUFFER_BYTES):
            block = memoryview(content)[start : start + BUFFER_BYTES]
            self.read(stored, start, block)
            crc32 = zlib.crc32(block, crc32)
        self.compare(stored, crc32, mend)
        return content

    def are_equal(self, one: Stored, other: Stored) -> bool:
        """Whether dtype, shape and every bit are the same."""
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return all(a == b for a, b in zip(self._blocks(one), self._blocks(other), strict=True))

    def is_zero(self, part: Stretch) -> bool:
        """Whether every byte of ``part`` is zero."""
        blocks = part.view.blocks(range(part.start, part.stop), BUFFER_BYTES)
        return not any(any(self.read_columns(part.view, rows, indices)) for rows, indices in blocks)

    def _blocks(self, stored: Stored) -> Iterator[memoryview]:
        """The bytes of a tensor in order; each block is gone when the next one is asked for."""
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
