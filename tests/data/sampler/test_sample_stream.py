import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.data.sampler.sampler import shuffled
from tests.data.oracle import plain_order

sizes = st.integers(1, 60)
seeds = st.integers(0, 2**32)


def stream(num_samples, seed, first, count, shuffle=True):
    return shuffled(num_samples, seed, shuffle).samples(first, count).tolist()


@given(sizes, seeds, st.integers(0, 5), st.booleans())
def test_each_epoch_holds_each_sample_once(num_samples, seed, epoch, shuffle):
    samples = stream(num_samples, seed, epoch * num_samples, num_samples, shuffle)
    assert sorted(samples) == list(range(num_samples))


@given(sizes, seeds, st.integers(0, 200), st.integers(0, 100), st.integers(0, 100))
def test_a_stream_does_not_depend_on_the_pieces_it_is_read_in(num_samples, seed, first, count, more):
    whole = stream(num_samples, seed, first, count + more) if count + more else []
    one = stream(num_samples, seed, first, count) if count else []
    assert one + (stream(num_samples, seed, first + count, more) if more else []) == whole


def test_without_shuffle_the_order_is_the_files():
    assert stream(3, 7, 0, 7, shuffle=False) == [0, 1, 2, 0, 1, 2, 0]


def test_order_differs_between_epochs_and_between_seeds():
    orders = [tuple(stream(50, seed, epoch * 50, 50)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16


def test_the_order_of_a_seed_is_that_of_earlier_versions():
    """Otherwise a run resumed with a new version would repeat some samples and skip others."""
    for epoch in (0, 3):
        expected = np.random.default_rng(np.random.SeedSequence([5, epoch])).permutation(20).tolist()
        assert stream(20, 5, epoch * 20, 20) == expected


def global_batch(step, dp_size, micro_batch_size, num_samples, seed, global_batch_size, consumed_samples=0):
    """Indices of all ranks, microbatch by microbatch."""
    steps = [
        plain_order(
            num_samples, seed, True, global_batch_size, micro_batch_size, dp_rank, dp_size, consumed_samples
        ).step(step)
        for dp_rank in range(dp_size)
    ]
    assert {len(one) for one in steps} == {global_batch_size // (micro_batch_size * dp_size)}
    return [index for turn in zip(*steps, strict=True) for indices in turn for index in indices]


@pytest.mark.parametrize("global_batch_size", [4, 8])
def test_resume_with_another_global_batch_size_skips_and_repeats_nothing(global_batch_size):
    before = [index for step in range(2) for index in global_batch(step, 1, 1, 28, 3, 6)]
    num_steps = (28 - len(before)) // global_batch_size
    after = [
        index
        for step in range(num_steps)
        for index in global_batch(step, 2, 2, 28, 3, global_batch_size, consumed_samples=len(before))
    ]
    assert sorted(before + after) == list(range(28))
