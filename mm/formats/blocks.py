"""Writes tensors to a file block by block: while one block comes to the host, those before it are summed and written.

It knows nothing of devices and ranks: ``Host`` says how a tensor comes to the host.  Nothing here talks to other ranks,
so that a save may run in any thread.
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
"""The size of a block.  Chosen, not measured on an accelerator: three buffers take 48 MiB a rank."""
NUM_BLOCKS = 3
"""In memory at a time: one comes to the host, one is summed, one is written."""
_ALIGN_BYTES = 64
"""Where a tensor begins in a buffer: any dtype may be read there."""


class Host(Protocol):
    """How tensors come to the host from where they live; ``mm.device.device.Device`` is one."""

    def host_buffer(self, num_bytes: int) -> Tensor | None:
        """Memory that ``start_copying_back`` fills; None where tensors are on the host already."""
        ...

    def start_copying_back(self, tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Begin to copy ``tensor``; calling the result waits for the copy and gives it."""
        ...


class _SameMemory:
    """Tensors are on the host already."""

    def host_buffer(self, num_bytes: int) -> Tensor | None:
        return None

    def start_copying_back(self, tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        return lambda: tensor


ON_HOST: Host = _SameMemory()


@dataclass(frozen=True)
class Values:
    """The numbers of a tensor in a file, where they live: on any device, with padding that the file leaves out."""

    live: Tensor
    memory: MemoryLayout | None = None
    """How the parameter that ``live`` is of lies in memory; None: without padding."""
    start: int = 0
    """Which element of the flattened parameter ``live`` begins with."""


@dataclass(frozen=True)
class _Part:
    """Neighbouring elements of one tensor in a block."""

    name: str
    values: Values
    elements: Tensor
    first: int
    """Position of the first one in ``values.live``."""
    offset: int
    """Bytes of the block before it."""

    def start(self, host: Host, buffer: Tensor | None) -> Callable[[], Tensor]:
        """Begin to copy it into ``buffer``; calling the result gives what the file holds of it."""
        num_bytes = self.elements.nbytes
        into = None if buffer is None else buffer[self.offset : self.offset + num_bytes].view(self.elements.dtype)
        arrived, memory, first = host.start_copying_back(self.elements, into), self.values.memory, self.first
        return arrived if memory is None else lambda: memory.cut(arrived(), self.values.start + first)


_Coming = list[tuple[str, Callable[[], Tensor]]]
"""A block on its way to the host: for each part the name of its tensor, and what waits for it."""


def write_tensors(
    opened: BinaryIO, tensors: Sequence[tuple[str, Values]], host: Host = ON_HOST, block_bytes: int = BLOCK_BYTES
) -> dict[str, int]:
    """Write ``tensors`` one after the other and return the checksums of what was written, by name.

    Two threads sum and write the blocks; zlib and the system's write let others run.  On the host it takes at most
    ``NUM_BLOCKS`` blocks, and about as much again for the moment in which padding is cut from one; where tensors are
    there already and have no padding, nothing.  The file's position must be that of the first tensor.  Raises what
    writing raises; nothing is written any more then.
    """
    assert block_bytes % _ALIGN_BYTES == 0, block_bytes
    buffers = cycle([host.host_buffer(block_bytes) for _ in range(NUM_BLOCKS)])
    crc32s = {name: 0 for name, _ in tensors}
    with ThreadPoolExecutor(1, "sum") as summing, ThreadPoolExecutor(1, "write") as writing:
        busy: deque[tuple[Future[None], ...]] = deque()

        def hand_on(coming: _Coming) -> None:
            block = [(name, _bytes(arrived())) for name, arrived in coming]
            busy.append((summing.submit(_sum, crc32s, block), writing.submit(_write, opened, block)))

        try:
            before: _Coming = []
            for parts in _blocks(tensors, block_bytes):
                if len(busy) + bool(before) == NUM_BLOCKS:
                    _finish(busy.popleft())  # its buffer is the next one
                buffer = next(buffers)
                coming = [(part.name, part.start(host, buffer)) for part in parts]
                if before:
                    hand_on(before)
                before = coming
            if before:
                hand_on(before)
            while busy:
                _finish(busy.popleft())
        except BaseException:
            for pool in (summing, writing):
                pool.shutdown(wait=False, cancel_futures=True)  # leaving the block waits for what has begun
            raise
    return crc32s


def _blocks(tensors: Sequence[tuple[str, Values]], block_bytes: int) -> Iterator[list[_Part]]:
    """The elements of all tensors in order, divided into blocks: small tensors share one, large ones take several."""
    parts: list[_Part] = []
    filled = 0
    for name, values in tensors:
        flat, first = values.live.detach().reshape(-1), 0
        while first < len(flat):
            stop = min(len(flat), first + (block_bytes - filled) // flat.itemsize)
            if stop > first:
                parts.append(_Part(name, values, flat[first:stop], first, filled))
                filled += -(-parts[-1].elements.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
            if stop < len(flat):
                yield parts
                parts, filled = [], 0
            first = stop
    if parts:
        yield parts


def _bytes(tensor: Tensor) -> memoryview:
    if tensor.stride() != (1,):  # to torch one number with a gap behind it is contiguous, and yet no bytes
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8).numpy().data


def _sum(crc32s: dict[str, int], block: Sequence[tuple[str, memoryview]]) -> None:
    for name, data in block:
        crc32s[name] = zlib.crc32(data, crc32s[name])


def _write(opened: BinaryIO, block: Sequence[tuple[str, memoryview]]) -> None:
    for _, data in block:
        opened.write(data)


def _finish(work: Sequence[Future[None]]) -> None:
    """Wait for it; raises what it raised."""
    for future in work:
        future.result()
