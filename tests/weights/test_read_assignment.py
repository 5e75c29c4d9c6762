"""Every weight is read by one rank, and no rank reads much more than another."""

from hypothesis import given
from hypothesis import strategies as st

from mm.weights.shard import readers


@given(st.lists(st.integers(0, 10**9), max_size=60), st.integers(1, 70))
def test_every_weight_has_one_reader_and_shares_are_even(num_bytes: list[int], num_ranks: int) -> None:
    chosen = readers(num_bytes, num_ranks)
    assert len(chosen) == len(num_bytes) and set(chosen) <= set(range(num_ranks))
    shares = [0] * num_ranks
    for size, rank in zip(num_bytes, chosen, strict=True):
        shares[rank] += size
    assert max(shares) - min(shares) <= max(num_bytes, default=0)


def test_the_largest_weights_go_to_ranks_far_apart() -> None:
    """With four ranks to a host, each of two hosts reads half of the four largest weights."""
    chosen = readers([1, 9, 9, 9, 9, 1, 8, 1], 8)
    assert chosen[1:5] == (0, 4, 2, 6) and sorted(chosen) == [*range(8)]
