"""Tensors written in blocks: correct bytes and checksums, concurrent copies and writes, errors; places of copies."""

import io
import zlib
from collections.abc import Callable
from itertools import pairwise
from threading import Event

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from mm.checkpoint.pipelined_write import NUM_BLOCKS, ON_HOST, Values, places_in_segments, write_tensors
from mm.weights.shard import MemoryLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64)
WAIT_SECONDS = 60
"""Time limit of a test that hangs."""


class FarMemory:
    """A device that overwrites its buffers at once, even if their content is still needed."""

    def __init__(self) -> None:
        self.num_started = 0
        self.third_started = Event()

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def start_copying_back(self, tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        assert into is not None
        into.copy_(tensor)
        self.num_started += 1
        if self.num_started == NUM_BLOCKS:
            self.third_started.set()
        return lambda: into


@st.composite
def values(draw) -> Values:
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    row, padding, rows = draw(st.integers(1, 40)), draw(st.integers(0, 9)), draw(st.integers(1, 9))
    padded_row = row + padding
    start = draw(st.integers(0, rows * padded_row))
    stop = draw(st.integers(start, rows * padded_row))
    live = torch.randint(0, 100, (stop - start,), generator=generator).to(dtype)
    memory = MemoryLayout((rows * padded_row,), (rows * row,), row, padded_row)
    return Values(live, draw(st.sampled_from([memory, None])), start)


def whole(one: Values) -> bytes:
    cut = one.live if one.memory is None else one.memory.unpad(one.live, one.start)
    return torch.cat([cut, cut[:0]]).view(torch.uint8).numpy().tobytes()


ONE_NUMBER = Values(torch.tensor([44.0, 39.0]), MemoryLayout((10,), (5,), 1, 2), 7)
"""A slice that begins within the padding."""


@example([ONE_NUMBER], 64, False)
@given(st.lists(values(), max_size=9), st.sampled_from([64, 128, 1024]), st.booleans())
def test_bytes_and_checksums_equal_those_of_whole_tensors(tensors, block_bytes: int, is_far: bool) -> None:
    opened, named = io.BytesIO(), [(str(number), one) for number, one in enumerate(tensors)]
    crc32s = write_tensors(opened, named, FarMemory() if is_far else ON_HOST, block_bytes)
    assert opened.getvalue() == b"".join(map(whole, tensors))
    assert crc32s == {name: zlib.crc32(whole(one)) for name, one in named}


def test_a_parameter_of_several_dimensions_is_written_in_memory_order() -> None:
    live = torch.arange(24.0).reshape(2, 3, 4).requires_grad_()
    opened = io.BytesIO()
    write_tensors(opened, [("a", Values(live)), ("b", Values(live.detach().mT))], block_bytes=64)
    assert opened.getvalue() == live.detach().numpy().tobytes() + live.detach().mT.contiguous().numpy().tobytes()


class Waiting(io.BytesIO):
    """Writes nothing before the copy of the third block has begun."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self._event = event

    def write(self, data) -> int:
        assert self._event.wait(WAIT_SECONDS), "the copies waited for the first write"
        return super().write(data)


def test_later_blocks_are_copied_and_checksummed_while_the_first_is_written() -> None:
    """And a buffer is not reused before its content is written."""
    far = FarMemory()
    opened, live = Waiting(far.third_started), torch.arange(200.0)
    found = write_tensors(opened, [("a", Values(live))], far, 64)
    assert opened.getvalue() == live.numpy().tobytes()
    assert found == {"a": zlib.crc32(live.numpy().tobytes())}


class Full(io.BytesIO):
    """Accepts two blocks, then the disk is full."""

    num_refused = 0

    def write(self, data) -> int:
        if self.tell() >= 128:
            self.num_refused += 1
            raise OSError(28, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("far", [ON_HOST, FarMemory()])
def test_a_failed_write_is_raised_and_ends_the_copies(far) -> None:
    opened = Full()
    with pytest.raises(OSError, match="No space left"):
        write_tensors(opened, [("a", Values(torch.zeros(100_000)))], far, 64)
    assert len(opened.getvalue()) == 128 and 1 <= opened.num_refused <= NUM_BLOCKS
    assert getattr(far, "num_started", 0) <= 2 * NUM_BLOCKS + 2


@given(st.lists(st.integers(0, 10_000), max_size=60))
def test_copies_do_not_overlap_and_waste_little(sizes: list[int]) -> None:
    places, segments = places_in_segments(sizes)
    assert all(size & (size - 1) == 0 for size in segments)
    taken = sorted((segment, at, at + size) for (segment, at), size in zip(places, sizes, strict=True) if size)
    assert all(at % 64 == 0 and stop <= segments[segment] for segment, at, stop in taken)
    assert all(one[0] < two[0] or one[2] <= two[1] for one, two in pairwise(taken))
    needed = sum(-(-size // 64) * 64 for size in sizes)
    assert needed <= sum(segments) <= 2 * needed


def test_one_large_tensor_among_small_ones() -> None:
    """9 GiB as one power of two would take 16."""
    gib = 1 << 30
    _, segments = places_in_segments([gib, 2 * gib, *[gib // 2] * 12])
    assert sum(segments) == 9 * gib and max(segments) == 4 * gib
