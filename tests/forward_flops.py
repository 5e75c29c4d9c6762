"""Forward FLOPs of a batch by part of the model, for tests and benchmarks."""

from dataclasses import dataclass

from mm.batch import BatchTotals
from mm.config.model import ModelConfig
from mm.model.flops import blocks
from mm.weights.table import Place


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one forward pass."""

    vision: float
    """Without the projector."""
    projector: float
    language: float


def forward_flops(model: ModelConfig, totals: BatchTotals) -> ForwardFlops:
    """The sums of the blocks of each part."""
    found = blocks(model, totals)
    return ForwardFlops(*(sum(block.forward for block in found if block.place in places) for places in (
        (Place.PATCH_EMBEDDING, Place.VISION_LAYER), (Place.PROJECTOR,), (Place.LANGUAGE_LAYER, Place.HEAD))))
