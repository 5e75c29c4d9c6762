"""Thinning keeps extreme values, counts and order in a bounded number of bins; running means are means."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.page.curve import Curve, running_means, stretches

values = st.one_of(st.floats(-1e6, 1e6), st.sampled_from((math.nan, math.inf, -math.inf)))
recorded = st.lists(st.tuples(st.integers(1, 50), values), min_size=1, max_size=300)
"""Distances between steps, and values."""


def curve_of(given_values: list[tuple[int, float]], max_bins: int) -> tuple[Curve, list[tuple[int, float]]]:
    found, step, points = Curve(max_bins), 0, []
    for distance, value in given_values:
        step += distance
        points.append((step, value))
        found.add(step, value)
    return found, points


@given(recorded, st.integers(1, 40))
def test_nothing_is_lost(given_values, max_bins) -> None:
    curve, points = curve_of(given_values, max_bins)
    finite = [value for _, value in points if math.isfinite(value)]
    assert 1 <= len(curve.bins) <= max_bins
    assert curve.bins[0].first == points[0][0] and curve.bins[-1].last == points[-1][0]
    assert all(one.last < other.first for one, other in pairwise(curve.bins))
    assert all(one.last - one.first < curve.width for one in curve.bins)
    assert sum(one.count for one in curve.bins) == len(finite) and curve.num_lost == len(points) - len(finite)
    if finite:
        assert max(one.most for one in curve.finite()) == max(finite)
        assert min(one.least for one in curve.finite()) == min(finite)
    for one in curve.bins:
        inside = [value for step, value in points if one.first <= step <= one.last and math.isfinite(value)]
        assert (one.count, one.total) == (len(inside), pytest.approx(sum(inside), abs=1e-6))
        assert not inside or (one.least, one.most) == (min(inside), max(inside))


def test_a_million_steps_are_four_hundred_bins_with_their_spike() -> None:
    curve = Curve()
    for step in range(1, 1_000_001):
        curve.add(step, 1e6 if step == 654_321 else 1.0)
    assert 200 <= len(curve.bins) <= 400 and curve.bins[-1].last == 1_000_000
    assert [one.most for one in curve.bins if one.first <= 654_321 <= one.last] == [1e6]


def test_a_short_curve_has_a_bin_for_each_step() -> None:
    curve, points = curve_of([(1, float(number)) for number in range(40)], 40)
    assert [(one.first, one.last, one.mean) for one in curve.bins] == [(step, step, value) for step, value in points]


def test_a_value_that_is_not_finite_is_a_gap() -> None:
    curve, _ = curve_of([(1, 1.0), (1, 2.0), (1, math.nan), (1, 3.0), (1, math.inf)], 40)
    assert [[one.mean for one in part] for part in stretches(curve.bins)] == [[1.0, 2.0], [3.0]]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), st.integers(1, 20))
def test_running_means(numbers, num_bins) -> None:
    curve, _ = curve_of([(1, number) for number in numbers], 60)
    before, after = (num_bins - 1) // 2, num_bins // 2
    windows = [numbers[max(0, place - before) : place + after + 1] for place in range(len(numbers))]
    expected = [math.fsum(window) / len(window) for window in windows]
    assert running_means(curve.bins, num_bins) == pytest.approx(expected, abs=1e-6)
