"""How messages name ranks."""

import pytest

from mm.parallel.ranks import ranks_text


@pytest.mark.parametrize(("ranks", "text"), [
    ([3], "rank 3"), ([0, 1], "ranks 0 to 1"), ([1, 3, 4, 5, 8], "ranks 1, 3 to 5, 8")])
def test_ranks_are_listed_in_spans(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
