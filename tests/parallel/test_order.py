"""The order of the pipeline's steps is megatron's, and everything that it sends is received and taken in time."""

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.device.device import Device
from mm.parallel.order import (
    Step,
    backward_order,
    forward_order,
    group_size,
    in_flight,
    num_warmup_steps,
    stage_receives,
    stage_steps,
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
