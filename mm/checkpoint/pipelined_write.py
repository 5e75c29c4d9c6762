"""Writes tensors to a file in a pipeline of blocks: one is copied to the host, one checksummed, one written.

``HostCopies`` copies everything first, so that training may go on.  Nothing here communicates with other ranks, so a
save may run in any thread.
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

from mm.checkpoint.tensor_io import tensor_bytes
from mm.errors import UserError
from mm.weights.shard import MemoryLayout

BLOCK_BYTES = 16 << 20
"""Size of a block.  Not tuned on an accelerator: three buffers take 48 MiB per rank."""
NUM_BLOCKS = 3
"""Blocks in memory at a time: one being copied, one being checksummed, one being written."""


class Host(Protocol):
    """Something that copies tensors to the host; ``mm.device.platform.Runtime`` is one."""

    def host_buffer(self, num_bytes: int) -> Tensor | None:
        """Memory for ``start_copying_back``; None if tensors are already on the host."""

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
    """Write ``tensors`` from the file's position on, and return the checksums of the written bytes, by name.

    Two threads checksum and write the blocks; zlib and the write call release the GIL.  Host memory: at most
    ``NUM_BLOCKS`` blocks, and about as much again while padding is cut from one; none for tensors that are already on
    the host and have no padding.
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


ALIGN_BYTES = 64
"""Alignment of tensors in a segment; enough for any dtype."""
_LARGEST_BYTES = 4 << 30
"""Largest size of a segment, unless a single tensor is larger."""


def places_in_segments(sizes_bytes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """The segment and byte offset of a tensor of each size, and the size of each segment.

    Segments are powers of two, because torch rounds pinned memory up to one, and none is larger than what is left to
    place unless a tensor needs it: a single segment could take nearly twice the memory.  First fit, largest first.
    """
    aligned = [-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes_bytes]
    left = sum(aligned)
    used, capacities = list[int](), list[int]()
    places: dict[int, tuple[int, int]] = {}
    for index in sorted(range(len(aligned)), key=lambda one: -aligned[one]):
        size = aligned[index]
        segment = next((one for one, filled in enumerate(used) if filled + size <= capacities[one]), len(used))
        if segment == len(used):
            used.append(0)
            capacities.append(max(_power_of_two(size), min(_LARGEST_BYTES, _power_of_two(left + 1) // 2)))
        places[index] = (segment, used[segment])
        used[segment] += size
        left -= size
    return [places[index] for index in range(len(aligned))], [_power_of_two(filled) for filled in used]


def _power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``; 0 for 0."""
    return 1 << (value - 1).bit_length() if value else 0


def host_segment(host: Host, num_bytes: int, needs: str, cure: str) -> Tensor:
    """Host memory as bytes, pinned on an accelerator; ``needs`` and ``cure`` are for the message that it is missing."""
    try:
        pinned = host.host_buffer(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8) if pinned is None else pinned
    except RuntimeError as error:
        raise UserError(f"{needs}, and {num_bytes:,} bytes of it cannot be allocated ({error}); {cure}") from error


class HostCopies:
    """Host memory for one copy of what a rank saves, pinned on an accelerator; allocated by the first save and kept."""

    def __init__(self, host: Host) -> None:
        self._host, self._segments = host, list[Tensor]()

    @property
    def num_bytes(self) -> int:
        return sum(len(segment) for segment in self._segments)

    def take(self, live: Sequence[Values]) -> list[Values]:
        """Copies of ``live``, complete on return, except of values that are copies.  Earlier copies are overwritten."""
        changing = [values for values in live if not values.is_copy]
        flats = [values.live.detach().reshape(-1) for values in changing]
        places, sizes_bytes = places_in_segments([flat.nbytes for flat in flats])
        if sizes_bytes != [len(segment) for segment in self._segments]:
            self._segments = []  # freed before the new memory is allocated
            self._segments = [host_segment(
                self._host, num_bytes, "--async-save needs host memory for one copy of what this rank saves",
                "remove the flag, or give the ranks of this node more memory") for num_bytes in sizes_bytes]
        into = [self._segments[segment][at : at + flat.nbytes].view(flat.dtype)
                for flat, (segment, at) in zip(flats, places, strict=True)]
        arriving = [self._host.start_copying_back(flat, memory) for flat, memory in zip(flats, into, strict=True)]
        copies = (Values(arrived(), values.memory, values.start)
                  for values, arrived in zip(changing, arriving, strict=True))
        return [values if values.is_copy else next(copies) for values in live]
