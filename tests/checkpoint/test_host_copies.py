"""Where copies of a save lie in host memory; ``tests/run/checkpoint/test_restore.py`` tests the saves."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mm.checkpoint.pipelined_write import places_in_segments


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
