"""How a microbatch is divided over ranks.  That training does not change: tests/test_parity.py."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mm.parallel.context import deal, even_rows, row_shard, zigzag_lengths, zigzag_rows

ranks = st.integers(1, 5)
segments = st.lists(st.integers(1, 40), max_size=6)


@given(num_rows=st.integers(0, 60), num_ranks=ranks)
def test_even_rows_follow_each_other(num_rows: int, num_ranks: int) -> None:
    rows = even_rows(num_rows, num_ranks)
    assert torch.cat(rows).tolist() == list(range(num_rows))
    counts = [len(one) for one in rows]
    assert len(counts) == num_ranks and max(counts) - min(counts) <= 1


@given(segment_lengths=segments, num_ranks=ranks)
def test_zigzag_rows_are_all_rows_once_in_order(segment_lengths: list[int], num_ranks: int) -> None:
    rows = zigzag_rows(segment_lengths, num_ranks)
    assert torch.cat(rows).sort().values.tolist() == list(range(sum(segment_lengths)))
    assert all(one.tolist() == sorted(one.tolist()) for one in rows)
    counts = [sum(map(sum, (zigzag_lengths(length, num_ranks)[rank] for length in segment_lengths)))
              for rank in range(num_ranks)]
    assert counts == [len(one) for one in rows]


def test_zigzag_by_hand() -> None:
    assert [one.tolist() for one in zigzag_rows([8, 4], 2)] == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


@given(num_ranks=ranks, chunk=st.integers(1, 20))
def test_ranks_of_the_zigzag_look_at_equally_many_keys(num_ranks: int, chunk: int) -> None:
    """Where 2 x ranks divides the segment: token i looks at i + 1 keys."""
    rows = zigzag_rows([2 * num_ranks * chunk], num_ranks)
    assert len({int((one + 1).sum()) for one in rows}) == 1


@given(costs=st.lists(st.floats(0, 100), max_size=20), num_ranks=ranks)
def test_no_rank_is_dealt_more_than_its_share_and_one(costs: list[float], num_ranks: int) -> None:
    dealt = deal(costs, num_ranks)
    loads = [sum(cost for cost, rank in zip(costs, dealt, strict=True) if rank == one) for one in range(num_ranks)]
    assert len(dealt) == len(costs) and set(dealt) <= set(range(num_ranks))
    assert max(loads) <= sum(costs) / num_ranks + max(costs, default=0.0) + 1e-9


@given(num_units=st.integers(0, 60), unit=st.sampled_from((1, 4)), num_ranks=st.integers(1, 8))
def test_row_shards_follow_each_other_and_only_the_last_are_smaller(num_units: int, unit: int, num_ranks: int) -> None:
    num_rows = num_units * unit
    pieces = [row_shard(num_rows, unit, rank, num_ranks) for rank in range(num_ranks)]
    rows = [row for piece in pieces for row in range(piece.start, piece.stop)]
    assert rows == list(range(num_rows))
    sizes = [piece.stop - piece.start for piece in pieces]
    assert all(size % unit == 0 for size in sizes)
    # what makes padding of a gathered buffer lie at its end: before a smaller piece all are as large as the first
    smaller = [rank for rank, size in enumerate(sizes) if size < sizes[0]]
    assert not any(sizes[rank] for rank in smaller[1:])
    assert sizes[0] * num_ranks < num_rows + unit * num_ranks


def test_fewer_rows_than_ranks_leave_some_without() -> None:
    assert [row_shard(3, 1, rank, 4) for rank in range(4)] == [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 3)]
    assert [row_shard(5, 1, rank, 4) for rank in range(4)] == [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 5)]
