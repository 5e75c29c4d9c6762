"""The simulated step: closed forms for even stages, and bounds for any."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.parallel.order import MessageCost, SlotCost, simulate, stage_steps, step_cost

SECONDS = st.floats(0.1, 3.0)


@given(num_stages=st.integers(1, 6), num_microbatches=st.integers(1, 20), forward=SECONDS, backward=SECONDS)
def test_even_stages_take_the_known_time(num_stages, num_microbatches, forward, backward) -> None:
    """(m + p - 1)(f + b): PipeDream-flush, arXiv:2104.04473, section 2.2."""
    slots = [SlotCost(forward, backward)] * num_stages
    expected = (num_microbatches + num_stages - 1) * (forward + backward)
    assert step_cost([slots] * num_microbatches, num_stages) == pytest.approx(expected)


@given(num_stages=st.integers(2, 5), num_chunks=st.integers(2, 4), num_groups=st.integers(1, 4), seconds=SECONDS)
def test_chunks_divide_the_idle_time(num_stages, num_chunks, num_groups, seconds) -> None:
    """(m + (p - 1) / v)(f + b), where p divides m: the same paper."""
    slots = [SlotCost(seconds / num_chunks, 2 * seconds / num_chunks)] * (num_stages * num_chunks)
    num_microbatches = num_groups * num_stages
    expected = (num_microbatches + (num_stages - 1) / num_chunks) * 3 * seconds
    assert step_cost([slots] * num_microbatches, num_stages) == pytest.approx(expected)


@given(num_stages=st.integers(2, 5), seconds=SECONDS, on_its_way=SECONDS)
def test_a_microbatch_waits_for_all_its_messages(num_stages, seconds, on_its_way) -> None:
    slots, messages = [SlotCost(seconds, 2 * seconds)] * num_stages, [MessageCost(on_its_way, on_its_way)] * num_stages
    timeline = simulate([slots], num_stages, [messages])
    assert max(stage[-1].end for stage in timeline) == pytest.approx(
        num_stages * 3 * seconds + 2 * (num_stages - 1) * on_its_way)


def test_messages_follow_one_another_on_a_link() -> None:
    """A frozen first stage is done at once; its messages arrive one after the other, and the second stage waits."""
    slots = [SlotCost(0.0, 0.0), SlotCost(1.0, 2.0)]
    (_, last) = simulate([slots] * 4, 2, [[MessageCost(5.0, 0.0)]] * 4)
    assert [step.start for step in last if step.is_forward] == [5.0, 10.0, 15.0, 20.0]
    assert last[-1].end == 23.0


@given(num_stages=st.integers(1, 4), num_chunks=st.integers(1, 3), num_microbatches=st.integers(4, 8))
def test_free_messages_change_nothing(num_stages, num_chunks, num_microbatches) -> None:
    num_chunks = num_chunks if num_stages > 1 else 1
    num_slots = num_stages * num_chunks
    costs = [[SlotCost(1.0 + slot + microbatch / 7, 2.0 + slot) for slot in range(num_slots)]
             for microbatch in range(num_microbatches)]  # fmt: skip
    free = [[MessageCost(0.0, 0.0)] * (num_slots - 1)] * num_microbatches
    assert simulate(costs, num_stages, free) == simulate(costs, num_stages)


def test_a_frozen_prefix_only_delays_the_first_microbatch() -> None:
    """Two stages without backward before two even ones: they run ahead, so only their first passes are waited for."""
    slots = [SlotCost(1.0, 0.0)] * 2 + [SlotCost(1.0, 2.0)] * 2
    assert step_cost([slots] * 8, 4) == pytest.approx(2 * 1.0 + (8 + 1) * 3.0)


@given(data=st.data(), num_stages=st.integers(1, 4), num_chunks=st.integers(1, 3))
def test_no_step_is_too_early_and_no_stage_does_two_things(data, num_stages, num_chunks) -> None:
    num_microbatches = data.draw(st.integers(num_stages if num_chunks > 1 else 1, 9))
    num_chunks = num_chunks if num_stages > 1 else 1
    num_slots = num_stages * num_chunks
    slots = st.lists(st.builds(SlotCost, SECONDS, st.just(0.0) | SECONDS), min_size=num_slots, max_size=num_slots)
    costs = data.draw(st.lists(slots, min_size=num_microbatches, max_size=num_microbatches))
    timeline = simulate(costs, num_stages)
    ends = {}
    for stage, steps in enumerate(timeline):
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(steps))
        assert [(step.is_forward, (step.microbatch, step.chunk)) for step in steps] == stage_steps(
            num_microbatches, stage, num_stages, num_chunks)
        ends |= {(step.is_forward, step.microbatch, step.chunk * num_stages + stage): step for step in steps}
    assert len(ends) == 2 * num_microbatches * num_slots
    for (is_forward, microbatch, slot), step in ends.items():
        if is_forward and slot:
            assert step.start >= ends[True, microbatch, slot - 1].end - 1e-9
        if not is_forward:
            assert step.start >= ends[True, microbatch, slot].end - 1e-9
        if not is_forward and costs[microbatch][slot].backward and slot < num_slots - 1:
            assert step.start >= ends[False, microbatch, slot + 1].end - 1e-9
