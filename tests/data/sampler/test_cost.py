"""The cost of a sample equals mm.model.flops for it alone; the order of microbatches is never slower than as given."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mm.batch import BatchTotals, image_pairs, window_pairs
from mm.config.model import ModelConfig
from mm.data.sample import Lengths
from mm.data.sampler.cost import SampleSizes, in_pipeline_order, pipeline_order
from mm.model.flops import training_flops
from mm.parallel.pipeline_schedule import SlotCost, step_cost
from tests.tiny import microbatch, our_config, random_sample

SMALL = our_config(((4,),), ((4,),))
grids = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 20).map(lambda n: 2 * n),
                           st.integers(1, 20).map(lambda n: 2 * n)), max_size=3)  # fmt: skip
samples = st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 1), grids), min_size=1, max_size=5)


def lengths_of(drawn, window: int) -> Lengths:
    rows = [
        (tokens, tokens * share // 2, len(media), sum(t * h * w for t, h, w in media), sum(map(image_pairs, media)),
         sum(window_pairs(grid, window) for grid in media))
        for tokens, share, media in drawn
    ]  # fmt: skip
    return Lengths(*np.array(rows, dtype=np.int64).T)


def flops_alone(model: ModelConfig, lengths: Lengths, number: int) -> float:
    tokens = int(lengths.num_tokens[number])
    return training_flops(model, BatchTotals(
        num_tokens=tokens, num_patches=int(lengths.num_patches[number]), num_images=int(lengths.num_media[number]),
        num_omitted_images=0, num_target_tokens=int(lengths.num_target_tokens[number]), num_target_samples=1,
        num_microbatches=1, num_causal_pairs=tokens * (tokens + 1) // 2,
        num_image_pairs=int(lengths.num_image_pairs[number]), num_window_pairs=int(lengths.num_window_pairs[number]),
    ))  # fmt: skip


FROZEN = {
    "nothing": SMALL,
    "vision": replace(SMALL, vision=replace(SMALL.vision, freeze=True)),
    "language": replace(SMALL, language=replace(SMALL.language, freeze=True)),
}


@pytest.mark.parametrize("frozen", FROZEN)
@given(samples)
def test_costs_are_the_flops_of_each_sample_alone(frozen, drawn):
    model = FROZEN[frozen]
    lengths = lengths_of(drawn, model.vision.window_attn_size // model.vision.patch_size)
    costs = SampleSizes(model, lengths).all_costs()
    expected = np.array([flops_alone(model, lengths, number) for number in range(len(drawn))])
    unit = 2 ** max(0, int(expected.max()).bit_length() - 40)
    assert costs.dtype == np.int64
    assert np.abs(costs * unit - expected).max() <= unit  # what is less than one unit is dropped


def test_the_largest_costs_fit_40_bits():
    many = np.array([10**6], dtype=np.int32)
    lengths = Lengths(many, many, many, many, np.array([10**12]), np.array([10**10]))
    (cost,) = SampleSizes(SMALL, lengths).all_costs()
    assert int(cost).bit_length() == 40


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
