"""Factors are found where passes determine them, shared where passes do not tell kinds apart, and otherwise 1."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.plan.factors import fitted_factors


@given(seed=st.integers(0, 10_000), factors=st.lists(st.floats(0.2, 5.0), min_size=1, max_size=6),
       more_passes=st.integers(2, 20))
def test_known_factors_are_found(seed: int, factors: list[float], more_passes: int) -> None:
    predicted = np.random.default_rng(seed).uniform(0.1, 1.0, (len(factors) + more_passes, len(factors)))
    found = fitted_factors(predicted, predicted @ np.array(factors))
    assert found.values == pytest.approx(factors, rel=1e-6)
    assert found.groups == tuple((kind,) for kind in range(len(factors)))
    assert max(found.errors) < 1e-5


@given(st.integers(0, 10_000))
def test_factors_bear_noise(seed: int) -> None:
    rng = np.random.default_rng(seed)
    predicted = rng.uniform(0.1, 1.0, (200, 3))
    measured = predicted @ np.array([1.5, 0.7, 1.0]) * rng.normal(1.0, 0.05, 200)
    found = fitted_factors(predicted, measured)
    for value, error, expected in zip(found.values, found.errors, (1.5, 0.7, 1.0), strict=True):
        assert abs(value - expected) < 5 * error < 0.5


def test_kinds_that_the_passes_do_not_tell_apart_share_a_factor() -> None:
    """The first two kinds share passes in one ratio; the third is alone in its passes."""
    predicted = np.array([[1.0, 2.0, 0.0], [2.0, 4.0, 0.0], [3.0, 6.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 2.0]])
    found = fitted_factors(predicted, predicted @ np.array([1.2, 1.2, 3.0]))
    assert found.values == pytest.approx((1.2, 1.2, 3.0))
    assert found.groups == ((2,), (0, 1))


def test_a_kind_below_the_noise_keeps_its_factor() -> None:
    rng = np.random.default_rng(0)
    predicted = np.stack([rng.uniform(0.5, 1.0, 40) * (np.arange(40) < 20), 1e-5 * (np.arange(40) >= 20)], axis=1)
    measured = predicted @ np.array([2.0, 2.0]) + rng.normal(0.0, 0.01, 40)
    found = fitted_factors(predicted, measured)
    assert found.groups == ((0,),)
    assert found.values == (pytest.approx(2.0, rel=0.02), 1.0)


@pytest.mark.parametrize(("predicted", "measured"), [
    ([[1.0]], [2.0]),  # one pass
    ([[0.0], [0.0]], [1.0, 2.0]),  # none of its kind
    ([[1.0], [1.0], [1.0]], [0.0, 0.0, 0.0]),
    ([[1.0], [1.0], [1.0]], [0.1, 9.0, 0.2]),  # far too noisy
])  # fmt: skip
def test_too_little_determines_nothing(predicted: list, measured: list) -> None:
    found = fitted_factors(np.array(predicted), np.array(measured))
    assert (found.values, found.groups, found.errors) == ((1.0,), (), ())


def test_no_passes_determine_nothing() -> None:
    assert fitted_factors(np.zeros((0, 2)), np.zeros(0)).values == (1.0, 1.0)
