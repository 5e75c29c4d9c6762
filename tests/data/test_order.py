import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.data.order import Order

sizes = st.integers(1, 60)
seeds = st.integers(0, 2**32)


def stream(num_samples, seed, shuffle=True):
    """One rank that takes one sample at a time."""
    return Order(num_samples, seed, shuffle, global_batch_size=1, micro_batch_size=1, dp_rank=0, dp_size=1)


@given(sizes, seeds, st.integers(0, 5), st.booleans())
def test_each_epoch_holds_each_sample_once(num_samples, seed, epoch, shuffle):
    order = stream(num_samples, seed, shuffle)
    positions = range(epoch * num_samples, (epoch + 1) * num_samples)
    assert sorted(map(order.sample_at, positions)) == list(range(num_samples))


def test_order_is_the_files_without_shuffle():
    assert [stream(3, 7, shuffle=False).sample_at(position) for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_order_differs_between_epochs_and_between_seeds():
    orders = [
        tuple(stream(50, seed).sample_at(epoch * 50 + place) for place in range(50))
        for seed in range(4)
        for epoch in range(4)
    ]
    assert len(set(orders)) == 16


def global_batch(step, dp_size, micro_batch_size, num_samples, seed, global_batch_size, consumed_samples=0):
    """Indices of all ranks, microbatch by microbatch."""
    orders = [
        Order(num_samples, seed, True, global_batch_size, micro_batch_size, dp_rank, dp_size, consumed_samples)
        for dp_rank in range(dp_size)
    ]
    return [
        index
        for microbatch in range(orders[0].num_microbatches)
        for order in orders
        for index in order.indices(step, microbatch)
    ]


@given(sizes, seeds, st.integers(0, 9), st.integers(0, 100))
def test_global_batch_is_the_same_for_every_layout(num_samples, seed, step, consumed):
    first = consumed + step * 12
    expected = [stream(num_samples, seed).sample_at(position) for position in range(first, first + 12)]
    for dp_size, micro_batch_size in ((1, 1), (1, 12), (2, 3), (3, 2), (4, 1), (12, 1)):
        assert global_batch(step, dp_size, micro_batch_size, num_samples, seed, 12, consumed) == expected


@given(sizes, seeds, st.integers(0, 5))
def test_resume_from_consumed_samples_goes_on_with_the_same_stream(num_samples, seed, steps_done):
    uninterrupted = [global_batch(step, 2, 2, num_samples, seed, 8) for step in range(steps_done + 3)]
    resumed = [global_batch(step, 2, 2, num_samples, seed, 8, consumed_samples=steps_done * 8) for step in range(3)]
    assert resumed == uninterrupted[steps_done:]


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
