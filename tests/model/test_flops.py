"""What a step costs: each block once, twice or three times, by what is trained."""

from mm.batch import BatchTotals
from mm.model.flops import blocks, training_flops
from mm.weights.table import Place
from tests.forward_flops import forward_flops
from tests.tiny import our_config


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
