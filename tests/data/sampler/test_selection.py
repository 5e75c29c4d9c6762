import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.data.sampler import sampler
from mm.data.sampler.sampler import chosen, split_off

counts, seeds = st.integers(0, 200), st.integers(0, 2**31)


@given(counts, st.floats(0, 500), st.none() | st.integers(1, 300), seeds)
def test_rates(num, rate, wanted, seed):
    found = chosen(num, rate, wanted, seed, "a")
    if num:
        assert len(found) == round((wanted or num) * rate / 100)
        times = np.bincount(found, minlength=num)
        assert times.max() - times.min() <= 1 and len(times) == num
    else:
        assert len(found) == 0
    assert (found == chosen(num, rate, wanted, seed, "a")).all()


def test_a_rate_of_100_takes_the_file_unchanged_and_others_are_drawn():
    assert chosen(5, 100, None, 1, "a").tolist() == [0, 1, 2, 3, 4]
    half = chosen(1000, 50, None, 1, "a")
    assert (np.diff(half) > 0).all()
    for other in (chosen(1000, 50, None, 2, "a"), chosen(1000, 50, None, 1, "b")):
        assert 200 < len(np.intersect1d(half, other)) < 300  # by chance 250


@given(st.lists(st.integers(0, 50), min_size=1), st.floats(0, 0.99), seeds)
def test_no_sample_is_on_both_sides(samples, rate, seed):
    samples = np.array(samples, dtype=np.int64)
    training, validation = split_off(samples, rate, seed)
    assert not np.isin(training, validation).any()
    assert len(np.unique(validation)) == len(validation) == round(len(np.unique(samples)) * rate)
    assert sorted([*training, *samples[np.isin(samples, validation)]]) == sorted(samples)
    again = split_off(samples, rate, seed)
    assert (again[0] == training).all() and (again[1] == validation).all()


@given(st.integers(0, 2000), st.integers(1, 4), st.floats(0, 1), st.integers(0, 9))
def test_the_validation_samples_come_from_a_permutation(count: int, step: int, rate: float, seed: int) -> None:
    """With several chunks and repeats too: resumed runs must find the same samples."""
    samples = np.concatenate([np.arange(0, count, step, dtype=np.uint32), np.arange(count, dtype=np.uint32)])
    different = np.unique(samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_BATCH_SAMPLES", 256)
        training, validation = split_off(samples, rate, seed)
    expected = np.sort(sampler._random(seed, "validation").permutation(different)[: round(len(different) * rate)])
    assert np.array_equal(validation, expected) and validation.dtype == np.uint32
    assert np.array_equal(training, samples[~np.isin(samples, expected)]) and training.dtype == np.uint32
