"""How rows are cut over ranks.  That they come together again: tests/test_parity.py."""

from hypothesis import given
from hypothesis import strategies as st

from mm.parallel.context import row_shard


@given(num_units=st.integers(0, 60), unit=st.sampled_from((1, 4)), num_ranks=st.integers(1, 8))
def test_pieces_follow_each_other_and_only_the_last_are_smaller(num_units: int, unit: int, num_ranks: int) -> None:
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
