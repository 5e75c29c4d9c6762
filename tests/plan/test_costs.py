"""The seconds of slots are those of their blocks: with FLOPs as laws they are the FLOPs that the trainer counts."""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.batch import NO_SAMPLES, BatchTotals
from mm.config.activations import RecomputeConfig
from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig
from mm.errors import UserError
from mm.model.flops import Backward, block_backwards, blocks, slot_flops
from mm.parallel.simulation import as_costs
from mm.plan.by_flops import calibration_by_flops
from mm.plan.calibration import BlockLaws, Calibration, Machine, MeasuredBlock
from mm.plan.costs import VISION_PLACES, WHOLE_LAYER, BlockCosts, Cutting, block_keys, counts_of, laws_of
from mm.plan.laws import Law
from tests.tiny import our_config

WHOLE = Cutting(1, sequence_parallel=False)
LAYOUTS = ((((4,),), ((4,),)), (((4, 0),), ((1, 3),)), (((2, 2), (0, 0)), ((0, 0), (2, 2))))
TOTALS = BatchTotals(300, 480, 3, 0, 120, 2, 1, 30_000, 90_000, 20_000)
TEXT = replace(TOTALS, num_patches=0, num_images=0, num_image_pairs=0, num_window_pairs=0)


def by_flops(model: ModelConfig, chunk_pass: float = 0.0) -> Calibration:
    """A calibration of a device that does one FLOP a second."""
    measured = {}
    for has_images in (False, True):
        keys, backwards = block_keys(model, WHOLE, has_images), block_backwards(model, has_images)
        one_row = {(block.place, block.layer): block for block in blocks(model, TOTALS)}
        more = {(block.place, block.layer): block for block in blocks(model, replace(
            TOTALS, num_causal_pairs=30_001, num_image_pairs=90_001, num_window_pairs=20_001))}
        for place, key in keys.items():
            block = one_row[place]
            per_pair = more[place].forward - block.forward
            forward = Law(0.0, (block.forward - per_pair * block.pairs) / block.rows, per_pair)
            factor = backwards[place].num_forward
            measured[key] = MeasuredBlock(key, BlockLaws(
                forward, Law(0.0, forward.per_row * factor, forward.per_pair * factor)), 0.0)
    machine = Machine("a device", "fp32", 1, {})
    return Calibration(machine, "2026-11-25", tuple(measured.values()), chunk_pass, None, Law(0.0, 0.0), None, {})


def seconds(model: ModelConfig, calibration: Calibration, *totals: BatchTotals) -> np.ndarray:
    """[2, num_microbatches, num_slots]"""
    costs = BlockCosts.of(model, WHOLE, calibration)
    return costs.of_slots(counts_of(totals), costs.slots_of([model.placement()]))[..., 0]


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


def test_a_pass_costs_the_host_once_for_each_slot_and_direction() -> None:
    model = our_config(((4, 0),), ((1, 3),), freeze=("vision", "projector"))
    plain, more = (seconds(model, by_flops(model, chunk_pass), TOTALS, TEXT)
                   for chunk_pass in (0.0, 1000.0))
    assert np.array_equal(more - plain > 0, np.array([[[True, True]] * 2, [[True, True]] * 2]))
    assert np.allclose(more - plain, 1000.0)


def test_a_pass_in_a_pipeline_costs_the_host_more() -> None:
    for layout, expected in ((LAYOUTS[0], 1.0), (LAYOUTS[1], 5.0)):
        model = our_config(*layout)
        plain = seconds(model, by_flops(model), TOTALS)
        calibration = replace(by_flops(model, chunk_pass=1.0), pipeline_pass=5.0)
        assert np.allclose(seconds(model, calibration, TOTALS) - plain, expected)


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
    with pytest.raises(UserError, match=r"no LLM layer of this run: matrices 96 x 48, .* on each of 1 tensor.*, "
                                        r"backward pass: the gradients of the input and of adapters, .*mm-plan cal"):
        BlockCosts.of(other, WHOLE, by_flops(model))
    assert counts_of([NO_SAMPLES]).sum() == 0
