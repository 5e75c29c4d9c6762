"""The order of the pipeline's steps is megatron's, and its timeline follows closed forms and bounds."""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.device.device import Device
from mm.parallel.pipeline_schedule import (
    SlotCost,
    Step,
    backward_order,
    forward_order,
    group_size,
    in_flight,
    num_warmup_steps,
    simulate,
    stage_receives,
    stage_steps,
    step_cost,
)


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int, int]:
    """Microbatches, stages and chunks that go together."""
    num_chunks = draw(st.integers(1, 4))
    num_stages = draw(st.integers(2, 8))
    num_microbatches = draw(st.integers(num_stages if num_chunks > 1 else 1, 40))
    return num_microbatches, num_stages, num_chunks


@given(counts=counts(), stage=st.integers(0, 7))
def test_the_order_is_megatrons(counts: tuple[int, int, int], stage: int) -> None:
    Device.pick("cpu")
    from megatron.core.pipeline_parallel import schedules

    num_microbatches, num_stages, num_chunks = counts
    stage = stage % num_stages
    size = group_size(num_microbatches, num_stages) if num_chunks > 1 else num_microbatches
    order = forward_order(*counts)
    assert order == [tuple(one) for one in schedules.get_schedule_table(num_microbatches, num_chunks, size)]
    group = SimpleNamespace(size=lambda: num_stages, rank=lambda: stage)
    virtual = num_chunks if num_chunks > 1 else None
    communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
    _, _, num_warmup, _ = schedules.get_pp_rank_microbatches(
        num_microbatches, num_chunks, size, p2p_communicator=communicator)
    assert num_warmup_steps(num_microbatches, stage, num_stages, num_chunks) == num_warmup


@given(counts=counts())
def test_a_group_is_one_that_megatron_accepts(counts: tuple[int, int, int]) -> None:
    num_microbatches, num_stages, num_chunks = counts
    if num_chunks == 1:
        return
    size = group_size(num_microbatches, num_stages)
    rest = num_microbatches % size
    assert num_stages <= size <= num_microbatches and (rest == 0 or rest >= num_stages)


@given(counts=counts(), stage=st.integers(0, 7))
def test_every_step_is_run_once_and_nothing_stays_in_flight(counts: tuple[int, int, int], stage: int) -> None:
    num_microbatches, num_stages, num_chunks = counts
    forward = forward_order(*counts)
    places = Counter((m, c) for m in range(num_microbatches) for c in range(num_chunks))
    assert Counter(forward) == places == Counter(backward_order(forward))
    moments = list(in_flight(num_microbatches, stage % num_stages, num_stages, num_chunks))
    assert len(moments) == len(forward) and all(min(one) >= 0 for one in moments)
    num_warmup = num_warmup_steps(num_microbatches, stage % num_stages, num_stages, num_chunks)
    assert max(map(sum, moments)) == min(num_warmup + 1, len(forward))


@pytest.mark.parametrize(("counts", "size", "order"), [
    ((5, 2, 2), 3, [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]),
    ((2, 2, 2), 2, [(0, 0), (1, 0), (0, 1), (1, 1)]),
])
def test_orders_by_hand(counts: tuple[int, int, int], size: int, order: list[tuple[int, int]]) -> None:
    assert group_size(*counts[:2]) == size and forward_order(*counts) == order
    assert backward_order(order) == [(microbatch, 1 - chunk) for microbatch, chunk in order]


@given(counts=counts(), stage=st.integers(0, 7), starts_ahead=st.booleans(), forward_only=st.booleans())
def test_every_message_is_received_once_in_time_and_in_the_order_of_its_sender(
    counts: tuple[int, int, int], stage: int, starts_ahead: bool, forward_only: bool
) -> None:
    _, num_stages, num_chunks = counts
    stage = stage % num_stages

    def steps_of(other: int) -> list[Step]:
        return stage_steps(counts[0], other, num_stages, num_chunks, forward_only)

    steps = steps_of(stage)
    receives = stage_receives(steps, stage, num_stages, num_chunks, starts_ahead)
    for is_forward in (True, False):
        ends = (0, 0) if is_forward else (num_stages - 1, num_chunks - 1)
        needed = [step for step in steps if step[0] is is_forward and (stage, step[1][1]) != ends]
        received = [step for some in receives for step in some if step[0] is is_forward]
        before, last = (stage - 1, num_chunks - 1) if is_forward else (stage + 1, 0)
        around = before not in range(num_stages)
        onward = (1 if is_forward else -1) if around else 0
        sent = [(is_forward, (m, c + onward)) for direction, (m, c) in steps_of(before % num_stages)
                if direction is is_forward and not (around and c == last)]
        assert received == sent and Counter(received) == Counter(needed)
    for place, some in enumerate(receives):
        assert all(steps.index(step) >= place for step in some)


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
    slots, messages = [SlotCost(seconds, 2 * seconds)] * num_stages, [SlotCost(on_its_way, on_its_way)] * num_stages
    timeline = simulate([slots], num_stages, [messages])
    assert max(stage[-1].end for stage in timeline) == pytest.approx(
        num_stages * 3 * seconds + 2 * (num_stages - 1) * on_its_way)


def test_messages_follow_one_another_on_a_link() -> None:
    """A frozen first stage is done at once; its messages arrive one after the other, and the second stage waits."""
    slots = [SlotCost(0.0, 0.0), SlotCost(1.0, 2.0)]
    (_, last) = simulate([slots] * 4, 2, [[SlotCost(5.0, 0.0)]] * 4)
    assert [step.start for step in last if step.is_forward] == [5.0, 10.0, 15.0, 20.0]
    assert last[-1].end == 23.0


@given(num_stages=st.integers(1, 4), num_chunks=st.integers(1, 3), num_microbatches=st.integers(4, 8))
def test_free_messages_change_nothing(num_stages, num_chunks, num_microbatches) -> None:
    num_chunks = num_chunks if num_stages > 1 else 1
    num_slots = num_stages * num_chunks
    costs = [[SlotCost(1.0 + slot + microbatch / 7, 2.0 + slot) for slot in range(num_slots)]
             for microbatch in range(num_microbatches)]  # fmt: skip
    free = [[SlotCost(0.0, 0.0)] * (num_slots - 1)] * num_microbatches
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
