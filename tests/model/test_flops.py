"""The FLOP formula counts exactly what torch counts on the Hugging Face model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mm.batch import BatchTotals
from mm.model.flops import blocks, forward_flops, training_flops
from mm.weights.table import Place
from tests.tiny import hf_logits, hf_model, microbatch, our_config, random_sample

GRIDS = ((1, 8, 12), (1, 4, 6))


@pytest.fixture(scope="module")
def counted() -> tuple[BatchTotals, dict[str, int]]:
    sample = random_sample(torch.Generator().manual_seed(0), GRIDS, 12)
    model = hf_model()
    model.set_attn_implementation("eager")  # SDPA's CPU kernel is not in torch's FLOP table
    with FlopCounterMode(display=False, depth=4) as counter, torch.no_grad():
        hf_logits(model, sample)
    counts = {name: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}
    return BatchTotals.of([microbatch([sample])], our_config(((4,),), ((4,),)).vision), counts


def test_linear_flops_equal_torchs(counted) -> None:
    totals, counts = counted
    config = our_config(((4,),), ((4,),))
    (visual,) = [flops for name, flops in counts.items() if name.endswith(".visual")]
    (merger,) = [flops for name, flops in counts.items() if name.endswith("visual.merger")]
    assert forward_flops(config, totals).projector == merger
    assert forward_flops(config, totals).vision == visual - merger


def test_training_counts_three_passes_two_or_one() -> None:
    totals = BatchTotals(10, 16, 1, 0, 5, 1, 1, 55, 256, 64)
    forward = forward_flops(our_config(((4,),), ((4,),)), totals)

    def of(*freeze: str) -> float:
        return training_flops(our_config(((4,),), ((4,),), freeze=freeze), totals)

    assert of() == 3 * (forward.vision + forward.projector + forward.language)
    assert of("vision") == forward.vision + 3 * (forward.projector + forward.language)
    assert of("vision", "projector") == forward.vision + forward.projector + 3 * forward.language
    layers = our_config(((4,),), ((4,),), freeze_layers=("0-1,3", "0"), freeze_modules=("patch_embed", "norm"))
    vit = [block.forward for block in blocks(layers, totals) if block.place is Place.VISION_LAYER]
    llm = next(block.forward for block in blocks(layers, totals) if block.place is Place.LANGUAGE_LAYER)
    assert forward.vision == sum(vit) + 2 * 16 * 1176 * 32
    assert training_flops(layers, totals) == (
        3 * (forward.projector + forward.language) - llm  # of the LLM's first layer, which a gradient passes
        + forward.vision + 2 * vit[2] + vit[3])
    assert of("language") == 3 * (forward.vision + forward.projector) + 2 * forward.language
