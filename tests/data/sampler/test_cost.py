"""The cost of a sample equals mm.model.flops for a step with that sample alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.batch import BatchTotals, image_pairs, window_pairs
from mm.config.model import ModelConfig
from mm.data.sample import Lengths
from mm.data.sampler.cost import SampleSizes
from mm.model.flops import training_flops
from tests.tiny import our_config

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
