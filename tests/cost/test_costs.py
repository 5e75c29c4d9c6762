"""The seconds of slots are those of their blocks: with FLOPs as laws they are the FLOPs that the trainer counts."""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.batch import NO_SAMPLES, BatchTotals
from mm.config.layers import OffloadConfig, RecomputeConfig
from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.cost.by_device import calibration_by_device, calibration_by_flops
from mm.cost.calibration import Calibration
from mm.cost.costs import (
    HOST_BYTES_PER_SECOND,
    WHOLE_LAYER,
    BlockCosts,
    Cutting,
    behind_link,
    block_keys,
    exposed_layers,
    laws_of,
    offloaded_bytes,
)
from mm.cost.memory import MicrobatchSizes
from mm.cost.stage_memory import stage_memory
from mm.cost.workload import counts_of
from mm.device.device import KNOWN_DEVICES
from mm.errors import UserError
from mm.model.flops import Backward, block_backwards, slot_flops
from mm.parallel.pipeline_schedule import as_costs
from mm.weights.table import VISION_PLACES, Place
from tests.plan.test_dry_run import FULL, run_of
from tests.tiny import our_config

WHOLE, ALONE = Cutting(1, sequence_parallel=False), our_config(((4,),), ((4,),))
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
    full = replace(ALONE, language=replace(ALONE.language, recompute=RecomputeConfig("full", "block", 1)))
    calibration = by_flops(ALONE)
    keys = block_keys(full, WHOLE, has_images=True)
    recomputed = [place for place, key in keys.items() if key.recompute == WHOLE_LAYER]
    assert [layer for _, layer in recomputed] == [0]
    laws, before = laws_of(keys[recomputed[0]], calibration), calibration.blocks[-2].laws
    assert laws.forward == before.forward
    assert laws.backward == before.backward + before.forward


def test_whole_encoders_have_the_laws_of_one_tensor_parallel_rank() -> None:
    model = replace(ALONE, encoder_placement="tensor_ranks")
    found, alone, two = (block_keys(one, Cutting(size, sequence_parallel=size > 1), has_images=True)
                         for one, size in ((model, 2), (ALONE, 1), (ALONE, 2)))
    for place, key in found.items():
        assert key == (alone if place[0] in VISION_PLACES else two)[place]
    by_key = calibration_by_flops(model, Cutting(2, sequence_parallel=True), "bf16").by_key
    plain = calibration_by_flops(ALONE, WHOLE, "bf16").by_key
    for place, key in found.items():  # per FLOP of both ranks together
        factor = 2 if place[0] in VISION_PLACES else 1
        assert by_key[key].laws.forward.per_row == factor * plain[alone[place]].laws.forward.per_row


def test_a_block_that_was_not_measured_is_refused() -> None:
    other = replace(ALONE, lora=LoraConfig(r=2, target_modules=("all-linear",)))
    assert Backward.ADAPTERS in block_backwards(other, has_images=True).values()
    with pytest.raises(UserError, match=r"no LLM layer .* the gradients of the input and of adapters .*mm-plan"):
        BlockCosts.of(other, WHOLE, by_flops(ALONE))
    assert counts_of([NO_SAMPLES]).sum() == 0


def offloaded(run: Run, num_layers: int | None = None) -> Run:
    vision, language = (replace(tower, offload=OffloadConfig(True, num_layers))
                        for tower in (run.model.vision, run.model.language))
    return replace(run, model=replace(run.model, vision=vision, language=language))


@pytest.mark.parametrize("recompute", [RecomputeConfig(), RecomputeConfig("selective"), FULL], ids=str)
@pytest.mark.parametrize(("num_layers", "cut"), [(None, 20), (3, 20), (None, 23)])
def test_the_bytes_of_layers_are_those_in_host_memory(
    recompute: RecomputeConfig, num_layers: int | None, cut: int
) -> None:
    """But for the input of the first layer, which stays if it is a message, not its copy in another order."""
    run = offloaded(run_of("7b", [cut, 32 - cut], [0, 28], 2, bf16=True, recompute=recompute), num_layers)
    model, sizes = run.model, MicrobatchSizes(100_000, 400_000, 0)
    found = offloaded_bytes(model, 1, "bf16", 1)
    for stage, spec in enumerate(model.placement().slots):
        (chunk,) = stage_memory(run, model.placement(), stage).chunks
        patches = sum(found.get((Place.VISION_LAYER, layer), 0) for layer in spec.vision_layers)
        tokens = sum(found.get((Place.LANGUAGE_LAYER, layer), 0) for layer in spec.language_layers)
        message = 2 * model.vision.hidden_size * sizes.num_patches * (stage == 1 and cut == 20)
        expected = patches * sizes.num_patches + tokens * sizes.num_tokens - message
        assert expected <= chunk.host_bytes(sizes) < expected + 60 * (16 << 20)  # whole pages


def test_a_layer_takes_as_long_as_its_bytes_on_the_link() -> None:
    h200, a100 = (next(one for one in KNOWN_DEVICES if one.label == label) for label in ("H200", "A100 80GB"))
    run = run_of("7b", [32], [28], 1, bf16=True)
    calibration = calibration_by_device(run, h200, h200.links)
    laws = calibration.blocks[-2].laws
    assert behind_link(laws, 0, calibration, is_exposed=True) == laws
    slow, exposed = (behind_link(laws, 10**9, calibration, is_exposed=one) for one in (False, True))
    assert slow.forward == exposed.forward == replace(laws.forward, per_row=10**9 / HOST_BYTES_PER_SECOND)
    assert exposed.backward.per_row == 2 * slow.backward.per_row == 2 * slow.forward.per_row
    assert behind_link(laws, 10**9, replace(calibration, host_bytes=None), is_exposed=True) == laws
    plain, more = (BlockCosts.of(one.model, WHOLE, calibration).of_all(counts_of([TOTALS, TEXT]))
                   for one in (run, offloaded(run)))
    assert np.all(more > plain)
    # the input of a recomputed layer crosses while that layer is computed, except that of the ViT's last one
    run = run_of("7b", [32], [28], 1, bf16=True, recompute=FULL)
    calibration = calibration_by_device(run, a100, a100.links)
    plain, hidden = (BlockCosts.of(one.model, WHOLE, calibration).of_all(counts_of([TOTALS, TEXT]))
                     for one in (run, offloaded(run)))
    (last,) = exposed_layers(offloaded(run).model)
    waits = offloaded_bytes(offloaded(run).model, 1, "bf16", 1)[last] * TOTALS.num_patches / HOST_BYTES_PER_SECOND
    assert hidden - plain == pytest.approx([waits, 0], abs=1e-9)


def test_the_last_layer_of_a_slot_waits_for_its_activations() -> None:
    model = offloaded(run_of("7b", [20, 12], [0, 28], 2, bf16=True)).model
    assert exposed_layers(model) == {(Place.VISION_LAYER, 19), (Place.VISION_LAYER, 31)}
    model = offloaded(run_of("7b", [32, 0], [8, 20], 2, bf16=True)).model
    assert exposed_layers(model) == {(Place.VISION_LAYER, 31), (Place.LANGUAGE_LAYER, 7)}
    assert (Place.LANGUAGE_LAYER, 27) not in offloaded_bytes(model, 1, "bf16", 1), "before the head it stays"
    model = offloaded(run_of("7b", [32, 0], [8, 20], 2, bf16=True), 7).model
    assert exposed_layers(model) == frozenset(), "the layer after the last offloaded one hides its transfer"
