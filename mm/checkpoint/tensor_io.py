"""Reads, writes, checksums and comparisons of the tensors in the files of a directory."""

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from mm.checkpoint.manifest import MANIFEST_FILE
from mm.errors import UserError
from mm.weights.views import Span, Stored, StoredSpan, View, ViewIndex, dtype_name

BUFFER_BYTES = 1 << 18
"""Size of one read or write.  It fits a second-level cache; 4 MiB took twice as long."""

Blocks = Iterator[tuple[Stored, int, memoryview]]
"""A tensor, the position of a block's first byte in it, and the block, which is valid until the next one."""


class Files:
    """The open files of one directory, with ``suffix`` after each name.

    Each thread needs its own, because readahead is per open file.
    """

    def __init__(self, directory: Path, flags: int = os.O_RDONLY, suffix: str = "") -> None:
        self.directory, self._flags, self._suffix = directory, flags, suffix
        self._descriptors: dict[str, int] = {}

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self.directory / (file + self._suffix), self._flags)
        return self._descriptors[file]

    def read(self, stored: Stored, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a tensor, beginning at ``start``."""
        done = 0
        while done < len(into):
            num_bytes = os.preadv(self._descriptor(stored.file), [into[done:]], stored.offset + start + done)
            if num_bytes == 0:
                raise UserError(f"{self.directory / stored.file} ends within {stored.name}; copy it again.")
            done += num_bytes

    def write(self, stored: Stored, start: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor(stored.file), data[done:], stored.offset + start + done)

    def _read_columns(self, view: View, rows: range, indices: range) -> np.ndarray:
        """Only ``indices`` of ``rows`` of a stored tensor."""
        size, width, first = (number * view.index_bytes for number in (len(indices), view.num_indices, indices.start))
        content = np.empty(len(rows) * size, np.uint8)
        # Whole rows are contiguous, so they take one read.
        num_reads = 1 if size == width else len(rows)
        size *= len(rows) // num_reads
        for number, row in enumerate(rows[:num_reads]):
            into = content[number * size : (number + 1) * size]
            self.read(view.stored, row * width + first, into.data)
        return content

    def tensor(self, view: View, rows: range, indices: range) -> Tensor:
        """[row, index, place] of a stored tensor, in new memory."""
        content = self._read_columns(view, rows, indices)
        return torch.from_numpy(content).view(view.stored.dtype).view(len(rows), len(indices), -1)

    def block(self, index: ViewIndex, key: str, rows: range, indices: range) -> Tensor:
        """[row, index, place] of the Hugging Face tensor ``key`` as stored, without verifying checksums.

        ``indices`` are along the cut dimension, ``rows`` along the dimensions before it, places along those after it.
        """
        found = index.find(Span(key, indices.start, len(indices)))
        if len(kinds := {one.view.stored.dtype for one in found}) > 1:
            raise UserError(f"{self.directory} holds {key} as {' and '.join(sorted(map(dtype_name, kinds)))}; give a "
                            f"directory of the same dtype throughout.")
        blocks = [self.tensor(one.view, rows, range(one.start, one.stop)) for one in found]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)

    def target_blocks(self, index: ViewIndex, views: Sequence[View]) -> Blocks:
        """The bytes of ``views``, tensors of other files, read from this directory: one view, or some of ``groups``."""
        if views[0].num_rows == 1 or all(span.key is None for span in views[0].spans):
            (view,) = views
            return self._row_blocks(index, view)
        return self._column_blocks(index, views)

    def _row_blocks(self, index: ViewIndex, view: View) -> Blocks:
        buffer, position, size = memoryview(bytearray(BUFFER_BYTES)), 0, view.num_rows * view.index_bytes
        for span in view.spans:
            found = [(one.view.stored, one.start * size, one.span.length) for one in index.find(span)]
            for source, start, length in found or [(None, 0, span.length)]:
                for first in range(0, length * size, BUFFER_BYTES):
                    block = buffer[: length * size - first]
                    if source is None:
                        block[:] = bytes(len(block))
                    else:
                        self.read(source, start + first, block)
                    yield view.stored, position, block
                    position += len(block)

    def _column_blocks(self, index: ViewIndex, views: Sequence[View]) -> Blocks:
        """Like ``target_blocks``, for views that cut the same rows by columns; reads each row once."""
        spans = [span for view in views for span in view.spans if span.key is not None]
        first, last = min(span.start for span in spans), max(span.stop for span in spans)
        widest = max(last - first, *(view.num_indices for view in views)) * views[0].index_bytes
        num_rows, step = views[0].num_rows, max(1, BUFFER_BYTES // widest)
        for row in range(0, num_rows, step):
            rows = range(row, min(row + step, num_rows))
            read = self.block(index, spans[0].key or "", rows, range(first, last))
            for view in views:
                parts = [read.new_zeros(len(rows), span.length, read.shape[2]) if span.key is None else
                         read[:, span.start - first : span.stop - first] for span in view.spans]
                yield view.stored, row * view.num_indices * view.index_bytes, tensor_bytes(
                    parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))

    def holds(self, stored: Stored, start: int, data: memoryview) -> bool:
        """Whether a tensor has these bytes at ``start``."""
        found = memoryview(bytearray(len(data)))
        self.read(stored, start, found)
        return found == data

    def crc32(self, stored: Stored, into: bytearray | None = None) -> int:
        """Checksum of a tensor's bytes, which ``into`` keeps."""
        crc32 = 0
        for block in self._blocks(stored, into):
            crc32 = zlib.crc32(block, crc32)
        return crc32

    def check(self, stored: Stored, advice: str) -> None:
        """Raise UserError if a tensor has a checksum and its bytes do not match; ``advice`` ends the message."""
        if stored.crc32 is not None:
            self._compare(stored, self.crc32(stored), advice)

    def _compare(self, stored: Stored, crc32: int, advice: str) -> None:
        if stored.crc32 not in (None, crc32):
            raise UserError(f"{self.directory / stored.file}: {stored.name} is damaged (its crc32 differs from "
                            f"{MANIFEST_FILE}); {advice}.")

    def read_checked(self, stored: Stored, advice: str) -> bytearray:
        """Read the bytes of a tensor and verify its checksum in one pass, while they are in the processor's cache."""
        content = bytearray(stored.num_bytes)
        self._compare(stored, self.crc32(stored, content), advice)
        return content

    def are_equal(self, one: Stored, other: Stored) -> bool:
        """Whether dtype, shape and every bit are equal."""
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return all(a == b for a, b in zip(self._blocks(one), self._blocks(other), strict=True))

    def is_zero(self, part: StoredSpan) -> bool:
        """Whether every byte of ``part`` is zero."""
        blocks = part.view.blocks(range(part.start, part.stop), BUFFER_BYTES)
        return not any(self._read_columns(part.view, rows, indices).any() for rows, indices in blocks)

    def _blocks(self, stored: Stored, into: bytearray | None = None) -> Iterator[memoryview]:
        """The bytes of a tensor in order; without ``into``, each block overwrites the one before."""
        buffer = memoryview(bytearray(min(BUFFER_BYTES, stored.num_bytes)) if into is None else into)
        for start in range(0, stored.num_bytes, BUFFER_BYTES):
            at = 0 if into is None else start
            block = buffer[at : at + min(BUFFER_BYTES, stored.num_bytes - start)]
            self.read(stored, start, block)
            yield block

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


def groups(views: Sequence[View]) -> list[list[View]]:
    """``views`` in the order of the first of each group: those cut by columns from one tensor share its rows."""
    found: dict[object, list[View]] = {}
    for view in views:
        keys = [span.key for span in view.spans if span.key is not None]
        found.setdefault(keys[0] if keys and view.num_rows > 1 else view.stored, []).append(view)
    return list(found.values())


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the host."""
    flat = tensor.contiguous().reshape(-1)
    if flat.stride() != (1,):  # torch calls one strided element contiguous, but cannot view it as bytes
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data
