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

from torch import Tensor

from mm.checkpoint.tensor_io import tensor_bytes
from mm.weights.shard import MemoryLayout

BLOCK_BYTES = 16 << 20
"""Size of a block.  Not tuned on an accelerator: three buffers take 48 MiB per rank."""
NUM_BLOCKS = 3
"""Blocks in memory at a time: one being copied, one being checksummed, one being written."""


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

    def blocks(self, num_bytes: int) -> Iterator[tuple[int, Tensor]]:
        """The flat elements, ``num_bytes`` at a time, each block with the index of its first element."""
        flat = self.live.detach().reshape(-1)
        step = num_bytes // flat.itemsize
        return ((first, flat[first : first + step]) for first in range(0, len(flat), step))


def write_tensors(
    opened: BinaryIO, tensors: Sequence[tuple[str, Values]], host: Host = ON_HOST, block_bytes: int = BLOCK_BYTES
) -> dict[str, int]:
    """Write ``tensors`` one after the other and return the checksums of the written bytes, by name.

    Two threads checksum and write the blocks; zlib and the write call release the GIL.  Host memory: at most
    ``NUM_BLOCKS`` blocks, and about as much again while padding is cut from one; none for tensors that are already on
    the host and have no padding.  The file must be positioned at the first tensor.  Errors of the writer are raised,
    and nothing more is written.
    """
    buffers = cycle([host.host_buffer(block_bytes) for _ in range(NUM_BLOCKS)])
    crc32s = {name: 0 for name, _ in tensors}
    busy: deque[tuple[Future, ...]] = deque()

    def add(name: str, data: memoryview) -> None:
        crc32s[name] = zlib.crc32(data, crc32s[name])

    def wait() -> None:
        for future in busy.popleft():
            future.result()

    with ThreadPoolExecutor(1, "sum") as summing, ThreadPoolExecutor(1, "write") as writing:

        def submit(name: str, arrived: Callable[[], Tensor]) -> None:
            data = tensor_bytes(arrived())
            busy.append((summing.submit(add, name, data), writing.submit(opened.write, data)))

        try:
            before: tuple[str, Callable[[], Tensor]] | None = None
            for name, values in tensors:
                for first, elements in values.blocks(block_bytes):
                    if len(busy) + bool(before) == NUM_BLOCKS:
                        wait()  # frees the next buffer
                    pending = name, _start_copying(values, first, elements, host, next(buffers))
                    if before:
                        submit(*before)
                    before = pending
            if before:
                submit(*before)
            while busy:
                wait()
        except BaseException:
            for pool in (summing, writing):
                pool.shutdown(wait=False, cancel_futures=True)  # leaving the with block waits for running work
            raise
    return crc32s


def _start_copying(
    values: Values, first: int, elements: Tensor, host: Host, buffer: Tensor | None
) -> Callable[[], Tensor]:
    """Begin to copy a block of ``values`` into ``buffer``; calling the result returns it without padding."""
    into = None if buffer is None else buffer[: elements.nbytes].view(elements.dtype)
    arrived, memory = host.start_copying_back(elements, into), values.memory
    return arrived if memory is None else lambda: memory.unpad(arrived(), values.start + first)
