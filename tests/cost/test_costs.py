"""The seconds of slots are those of their blocks: with FLOPs as laws they are the FLOPs that the trainer counts."""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.batch import NO_SAMPLES, BatchTotals
from mm.config.layers import RecomputeConfig
from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig
from mm.cost.by_device import calibration_by_flops
from mm.cost.calibration import Calibration
from mm.cost.costs import WHOLE_LAYER, BlockCosts, Cutting, block_keys, laws_of
from mm.cost.workload import counts_of
from mm.errors import UserError
from mm.model.flops import Backward, block_backwards, slot_flops
from mm.parallel.order import as_costs
from mm.weights.table import VISION_PLACES
from tests.tiny import our_config

WHOLE = Cutting(1, sequence_parallel=False)
LAYOUTS = ((((4,),), ((4,),)), (((4, 0),), ((1, 3),)), (((2, 2), (0, 0)), ((0, 0), (2, 2))))
TOTALS = BatchTotals(300, 480, 3, 0, 120, 2, 1, 30_000, 90_000, 20_000)
TEXT = replace(TOTALS, num_patches=0, num_images=0, num_image_pairs=0, num_window_pairs=0)


def by_flops(model: ModelConfig) -> Calibration:
    """A calibration of a device that does one FLOP a second, measured by one process."""
    return replace(calibration_by_flops(model, WHOLE, "fp32"), message=None, all_reduce={})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("freeze", [(), ("vision",), ("language",), ("vision", "projector")])
def test_flops_as_laws_give_the_flops_of_slots(layout: tuple, freeze: tuple[str, ...]) -> None:
    model = our_config(*layout, freeze=freeze)
    both = BlockCosts.of(model, WHOLE, by_flops(model)), BlockCosts.in_flops(model)
    for found, number in itertools.product(both, range(2)):
        in_slots = found.of_slots(counts_of([TOTALS, TEXT]), found.slots_of([model.placement()]))
        costs = as_costs(in_slots[..., 0])[number]
        for one, other in zip(costs, slot_flops(model, [TOTALS, TEXT])[number], strict=True):
            assert (one.forward, one.backward) == pytest.approx((other.forward, other.backward), rel=1e-9, abs=1e-6)


@given(counts=st.lists(st.integers(0, 500), min_size=10, max_size=10))
def test_costs_are_linear_in_counts(counts: list[int]) -> None:
    names = [field.name for field in fields(BatchTotals)][:10]
    totals = BatchTotals(**{field.name: 0 for field in fields(BatchTotals)} | dict(zip(names, counts, strict=True)))
    model = our_config(((4, 0),), ((1, 3),))
    costs = BlockCosts.of(model, WHOLE, by_flops(model))
    if not totals.num_images:
        return
    double = replace(totals, **{name: 2 * count for name, count in zip(names, counts, strict=True)})
    once, twice = costs.of_blocks(counts_of([totals])), costs.of_blocks(counts_of([double]))
    assert np.allclose(twice, 2 * once)


def test_whole_recompute_adds_a_forward_pass() -> None:
    plain = our_config(((4,),), ((4,),))
    full = replace(plain, language=replace(plain.language, recompute=RecomputeConfig("full", "block", 1)))
    calibration = by_flops(plain)
    keys = block_keys(full, WHOLE, has_images=True)
    recomputed = [place for place, key in keys.items() if key.recompute == WHOLE_LAYER]
    assert [layer for _, layer in recomputed] == [0]
    laws, before = laws_of(keys[recomputed[0]], calibration), calibration.blocks[-2].laws
    assert laws.forward == before.forward
    assert laws.backward == before.backward + before.forward


def test_whole_encoders_have_the_laws_of_one_tensor_parallel_rank() -> None:
    cut = our_config(((4,),), ((4,),))
    model = replace(cut, encoder_placement="tensor_ranks")
    found, alone, two = (block_keys(one, Cutting(size, sequence_parallel=size > 1), has_images=True)
                         for one, size in ((model, 2), (cut, 1), (cut, 2)))
    for place, key in found.items():
        assert key == (alone if place[0] in VISION_PLACES else two)[place]
    by_key = calibration_by_flops(model, Cutting(2, sequence_parallel=True), "bf16").by_key
    plain = calibration_by_flops(cut, Cutting(1, sequence_parallel=False), "bf16").by_key
    for place, key in found.items():  # per FLOP of both ranks together
        factor = 2 if place[0] in VISION_PLACES else 1
        assert by_key[key].laws.forward.per_row == factor * plain[alone[place]].laws.forward.per_row


def test_a_block_that_was_not_measured_is_refused() -> None:
    model = our_config(((4,),), ((4,),))
    other = replace(model, lora=LoraConfig(r=2, target_modules=("all-linear",)))
    assert Backward.ADAPTERS in block_backwards(other, has_images=True).values()
    with pytest.raises(UserError, match=r"no LLM layer .* the gradients of the input and of adapters .*mm-plan"):
        BlockCosts.of(other, WHOLE, by_flops(model))
    assert counts_of([NO_SAMPLES]).sum() == 0
