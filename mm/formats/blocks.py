"""Writes tensors to a file in a pipeline of blocks: one is copied to the host, one checksummed, one written.

``Host`` abstracts the copy from a device.  Nothing here communicates with other ranks, so a save may run in any thread.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from mm.weights.memory import MemoryLayout

BLOCK_BYTES = 16 << 20
"""Size of a block.  Not tuned on an accelerator: three buffers take 48 MiB per rank."""
NUM_BLOCKS = 3
"""Blocks in memory at a time: one being copied, one being checksummed, one being written."""
ALIGN_BYTES = 64
"""Alignment of tensors in a buffer; enough for any dtype."""


class Host(Protocol):
    """Something that copies tensors to the host; ``mm.device.platform.Runtime`` is one."""

    def host_buffer(self, num_bytes: int) -> Tensor | None:
        """Memory for ``start_copying_back``; None if tensors are already on the host."""
        ...

    def start_copying_back(self, tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Begin to copy ``tensor``; calling the result waits for the copy and returns it."""
        ...


class _SameMemory:
    """For tensors that are already on the host."""

    def host_buffer(self, num_bytes: int) -> Tensor | None:
        return None

    def start_copying_back(self, tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        return lambda: tensor


ON_HOST: Host = _SameMemory()


@dataclass(frozen=True)
class Values:
    """The values of a tensor to be saved: on any device, and with padding that the file omits."""

    live: Tensor
    memory: MemoryLayout | None = None
    """Memory layout of the parameter that ``live`` belongs to; None: no padding."""
    start: int = 0
    """Index in the flattened parameter of the first element of ``live``."""
    is_copy: bool = False
    """Whether ``live`` is in host memory and training does not change it."""


@dataclass(frozen=True)
class _BlockElements:
    """Consecutive elements of one tensor in a block."""

    name: str
    values: Values
    elements: Tensor
    first: int
    """Index of the first element in ``values.live``."""
    offset: int
    """Byte offset in the block."""

    def start(self, host: Host, buffer: Tensor | None) -> Callable[[], Tensor]:
        """Begin to copy it into ``buffer``; calling the result returns the elements without padding."""
        num_bytes = self.elements.nbytes
        into = None if buffer is None else buffer[self.offset : self.offset + num_bytes].view(self.elements.dtype)
        arrived, memory, first = host.start_copying_back(self.elements, into), self.values.memory, self.first
        return arrived if memory is None else lambda: memory.unpad(arrived(), self.values.start + first)


_Pending = list[tuple[str, Callable[[], Tensor]]]
"""A block being copied to the host: for each tensor in it the name, and a function that waits for the copy."""


def write_tensors(
    opened: BinaryIO, tensors: Sequence[tuple[str, Values]], host: Host = ON_HOST, block_bytes: int = BLOCK_BYTES
) -> dict[str, int]:
    """Write ``tensors`` one after the other and return the checksums of the written bytes, by name.

    Two threads checksum and write the blocks; zlib and the write call release the GIL.  Host memory: at most
    ``NUM_BLOCKS`` blocks, and about as much again while padding is cut from one; none for tensors that are already on
    the host and have no padding.  The file must be positioned at the first tensor.  Errors of the writer are raised,
    and nothing more is written.
    """
    assert block_bytes % ALIGN_BYTES == 0, block_bytes
    buffers = cycle([host.host_buffer(block_bytes) for _ in range(NUM_BLOCKS)])
    crc32s = {name: 0 for name, _ in tensors}
    with ThreadPoolExecutor(1, "sum") as summing, ThreadPoolExecutor(1, "write") as writing:
        busy: deque[tuple[Future[None], ...]] = deque()

        def submit(pending: _Pending) -> None:
            block = [(name, _bytes(arrived())) for name, arrived in pending]
            busy.append((summing.submit(_sum, crc32s, block), writing.submit(_write, opened, block)))

        try:
            before: _Pending = []
            for elements_of_block in _blocks(tensors, block_bytes):
                if len(busy) + bool(before) == NUM_BLOCKS:
                    _finish(busy.popleft())  # frees the next buffer
                buffer = next(buffers)
                pending = [(one.name, one.start(host, buffer)) for one in elements_of_block]
                if before:
                    submit(before)
                before = pending
            if before:
                submit(before)
            while busy:
                _finish(busy.popleft())
        except BaseException:
            for pool in (summing, writing):
                pool.shutdown(wait=False, cancel_futures=True)  # leaving the with block waits for running work
            raise
    return crc32s


def _blocks(tensors: Sequence[tuple[str, Values]], block_bytes: int) -> Iterator[list[_BlockElements]]:
    """Divide the elements of all tensors, in order, into blocks: small tensors share one, large ones span several."""
    elements_of_block: list[_BlockElements] = []
    filled = 0
    for name, values in tensors:
        flat, first = values.live.detach().reshape(-1), 0
        while first < len(flat):
            stop = min(len(flat), first + (block_bytes - filled) // flat.itemsize)
            if stop > first:
                elements_of_block.append(_BlockElements(name, values, flat[first:stop], first, filled))
                filled += -(-elements_of_block[-1].elements.nbytes // ALIGN_BYTES) * ALIGN_BYTES
            if stop < len(flat):
                yield elements_of_block
                elements_of_block, filled = [], 0
            first = stop
    if elements_of_block:
        yield elements_of_block


def _bytes(tensor: Tensor) -> memoryview:
    if tensor.stride() != (1,):  # torch calls one strided element contiguous, but cannot view it as bytes
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8).numpy().data


def _sum(crc32s: dict[str, int], block: Sequence[tuple[str, memoryview]]) -> None:
    for name, data in block:
        crc32s[name] = zlib.crc32(data, crc32s[name])


def _write(opened: BinaryIO, block: Sequence[tuple[str, memoryview]]) -> None:
    for _, data in block:
        opened.write(data)


def _finish(work: Sequence[Future[None]]) -> None:
    """Wait for ``work`` and raise its errors."""
    for future in work:
        future.result()
