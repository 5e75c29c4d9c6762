"""Offloaded activations: the bytes that cross the link, their time beside a layer's."""

from dataclasses import replace

import numpy as np
import pytest

from mm.config.layers import OffloadConfig, RecomputeConfig
from mm.config.run import Run
from mm.cost.by_device import calibration_by_device
from mm.cost.costs import HOST_BYTES_PER_SECOND, BlockCosts, Cutting, behind_link, exposed_layers, offloaded_bytes
from mm.cost.memory import MicrobatchSizes
from mm.cost.stage_memory import stage_memory
from mm.cost.workload import counts_of
from mm.device.device import KNOWN_DEVICES
from mm.weights.table import Place
from tests.cost.test_costs import TEXT, TOTALS
from tests.plan.test_dry_run import run_of

FULL = RecomputeConfig("full", "uniform", 1)


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
    run = run_of("7b", [32], [28], 1, bf16=True)
    device = next(one for one in KNOWN_DEVICES if one.label == "H200")
    calibration = calibration_by_device(run, device, device.links)
    laws = calibration.blocks[-2].laws
    assert behind_link(laws, 0, calibration, is_exposed=True) == laws
    slow, exposed = (behind_link(laws, 10**9, calibration, is_exposed=one) for one in (False, True))
    assert slow.forward == exposed.forward == replace(laws.forward, per_row=10**9 / HOST_BYTES_PER_SECOND)
    assert exposed.backward.per_row == 2 * slow.backward.per_row == 2 * slow.forward.per_row
    assert behind_link(laws, 10**9, replace(calibration, host_bytes=None), is_exposed=True) == laws
    plain, more = (BlockCosts.of(one.model, Cutting(1, sequence_parallel=False), calibration).of_all(
        counts_of([TOTALS, TEXT])) for one in (run, offloaded(run)))
    assert np.all(more > plain)
    # the input of a recomputed layer crosses while that layer is computed, except that of the ViT's last one
    run = run_of("7b", [32], [28], 1, bf16=True, recompute=FULL)
    device = next(one for one in KNOWN_DEVICES if one.label == "A100 80GB")
    calibration = calibration_by_device(run, device, device.links)
    plain, hidden = (BlockCosts.of(one.model, Cutting(1, sequence_parallel=False), calibration).of_all(
        counts_of([TOTALS, TEXT])) for one in (run, offloaded(run)))
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
