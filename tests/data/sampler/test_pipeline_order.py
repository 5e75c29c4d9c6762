"""The order of a step's microbatches: complete, never slower than as given, and close to what lengths allow."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mm.data.sampler.cost import in_pipeline_order, pipeline_order
from mm.parallel.order import SlotCost, step_cost
from tests.tiny import microbatch, our_config, random_sample

SPREAD = (0.25, 0.5, 0.75, 1.0, 1.0, 1.25, 1.5, 1.75)
COST = st.floats(0.1, 3.0)


def costs_of(lengths: list[float], num_slots: int) -> list[list[SlotCost]]:
    return [[SlotCost(length, 2 * length)] * num_slots for length in lengths]


@given(data=st.data(), num_stages=st.integers(2, 4), num_chunks=st.integers(1, 2))
def test_all_microbatches_in_no_more_time_than_as_given(data, num_stages, num_chunks) -> None:
    slots = st.lists(st.builds(SlotCost, COST, st.just(0.0) | COST), min_size=num_stages * num_chunks,
                     max_size=num_stages * num_chunks)
    costs = data.draw(st.lists(slots, min_size=num_stages, max_size=12))
    order = pipeline_order(costs, num_stages)
    assert sorted(order) == list(range(len(costs)))
    assert step_cost([costs[number] for number in order], num_stages) <= step_cost(costs, num_stages)


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_changing_lengths_take_the_time_of_equal_ones(num_stages: int) -> None:
    """Within 3%; in the order they are read they take at least a fifth longer."""
    lengths = [SPREAD[5 * number % 8] for number in range(16)]
    changing, equal = costs_of(lengths, num_stages), step_cost(costs_of([1.0] * 16, num_stages), num_stages)
    ordered = [changing[number] for number in pipeline_order(changing, num_stages)]
    assert step_cost(changing, num_stages) > 1.2 * equal
    assert step_cost(ordered, num_stages) < 1.03 * equal


def test_equal_microbatches_keep_their_order() -> None:
    assert pipeline_order(costs_of([1.0] * 7, 3), 3) == list(range(7))


def test_microbatches_are_ordered_by_cost_and_unchanged_on_one_stage() -> None:
    """Images count too: the shortest text may be the costliest sample."""
    generator = torch.Generator().manual_seed(0)
    grids = ((), ((1, 16, 16),), (), ((1, 8, 8),))
    batch = [replace(microbatch([random_sample(generator, images, length)]), samples=(number,))
             for number, (images, length) in enumerate(zip(grids, (60, 8, 30, 50), strict=True))]
    model = our_config(((2, 2),), ((0, 4),))
    ordered = [one.samples[0] for one in in_pipeline_order(model, batch)]
    assert sorted(ordered) == [0, 1, 2, 3]
    assert ordered[0] == 2 and 1 in ordered[1:3]
    assert in_pipeline_order(our_config(((4,),), ((4,),)), batch) == batch
