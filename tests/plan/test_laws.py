"""Laws recover what they are fitted to, and no coefficient is negative."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.plan.laws import Law, Timed, fitted, relative_errors

ROWS = ((64, 4e3), (256, 2e4), (256, 6e4), (1024, 3e5), (2048, 3e6))
"""Rows and pairs of some microbatches."""
COEFFICIENTS = st.sampled_from((0.0, 1e-4, 3e-3))


@given(fixed=COEFFICIENTS, per_row=COEFFICIENTS, per_pair=st.sampled_from((0.0, 1e-8, 3e-7)))
def test_exact_times_give_their_law(fixed: float, per_row: float, per_pair: float) -> None:
    law = Law(fixed, per_row, per_pair)
    times = [Timed(rows, pairs, law.seconds(rows, pairs)) for rows, pairs in ROWS]
    if not any(one.seconds for one in times):
        return
    found = fitted(times)
    assert astuple(found) == pytest.approx((fixed, per_row, per_pair), rel=1e-6, abs=1e-15)


@given(noise=st.lists(st.floats(0.5, 2.0), min_size=len(ROWS), max_size=len(ROWS)))
def test_noisy_times_give_no_negative_coefficient(noise: list[float]) -> None:
    law = Law(1e-3, 1e-5, 1e-9)
    times = [Timed(rows, pairs, factor * law.seconds(rows, pairs))
             for (rows, pairs), factor in zip(ROWS, noise, strict=True)]
    found = fitted(times)
    assert min(found.fixed, found.per_row, found.per_pair) >= 0
    own, true = (np.square(relative_errors(one, times)).sum() for one in (found, law))
    assert own <= true + 1e-12  # no law that is allowed fits better


def test_nothing_takes_no_time() -> None:
    law = Law(1.0, 2.0, 3.0)
    assert law.seconds(0) == 0
    assert law.seconds(2, 5) == 20
    assert law + Law(1.0, 0.0) == Law(2.0, 2.0, 3.0)
