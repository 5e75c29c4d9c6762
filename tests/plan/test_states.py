"""Whose optimizer states are in host memory."""

from hypothesis import given
from hypothesis import strategies as st

from mm.plan.states import offloaded


@given(st.lists(st.integers(1, 1000), max_size=20), st.floats(0, 1))
def test_host_memory_has_the_share_that_was_asked_for_but_for_a_part_of_the_smallest_other(sizes, share: float) -> None:
    chosen = offloaded(sizes, share)
    assert chosen == sorted(set(chosen))
    left = round(share * sum(sizes)) - sum(sizes[index] for index in chosen)
    others = [size for index, size in enumerate(sizes) if index not in chosen]
    assert left >= 0 and all(left < size for size in others)


def test_all_or_nothing() -> None:
    assert offloaded([3, 1, 2], 1.0) == [0, 1, 2] and offloaded([3, 1, 2], 0.0) == []
    assert offloaded([3, 1, 2], 0.5) == [0]  # the largest first
