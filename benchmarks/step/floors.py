"""Formulas for the cost of a step: its peak memory, and its FLOPs including recomputation."""

import math
from dataclasses import dataclass

from mm.batch import BatchTotals
from mm.config.model import ModelConfig
from mm.cost.layer_memory import FP32, WIDTHS
from mm.cost.memory import ChunkMemory, MicrobatchSizes
from mm.cost.stage_memory import StageMemory
from mm.model.flops import blocks, training_flops
from mm.weights.table import Place, model_weights
from mm.weights.trained import GradientPath, is_frozen

OPTIMIZER_BYTES_PER_PARAM = 30
"""Least memory traffic of one update, in one pass: fp32 weight and both moments read and written, gradient read, bf16
weight written.  ``mm.cost.by_device`` has what our kernels move."""
FROZEN_BYTES_PER_PARAM = WIDTHS["bf16"]
STATE_BYTES_PER_PARAM = FROZEN_BYTES_PER_PARAM + 4 * FP32
"""bf16 weight, and in fp32 gradient, weight and two moments."""


@dataclass(frozen=True)
class Params:
    """Numbers of trained and of frozen weights of a model."""

    trained: int
    frozen: int

    @classmethod
    def of(cls, model: ModelConfig) -> "Params":
        sizes = [(math.prod(weight.shape), is_frozen(weight, model)) for weight in model_weights(model)]
        return cls(sum(n for n, frozen in sizes if not frozen), sum(n for n, frozen in sizes if frozen))


@dataclass(frozen=True)
class ExpectedMemory:
    """Bytes on one device at the peak of a bf16 step without parallelism, as ``--dry-run`` computes them."""

    states: int
    activations: int
    at_work: int
    """Logits, or the temporary tensors of one layer."""

    @classmethod
    def of(cls, model: ModelConfig, largest: BatchTotals) -> "ExpectedMemory":
        """``largest``: the counts of the largest microbatch."""
        params, placement = Params.of(model), model.placement()
        memory = StageMemory(tuple(ChunkMemory(model, placement, placement[0, chunk], tp_size=1, precision="bf16")
                                   for chunk in range(placement.num_chunks)))
        rows = MicrobatchSizes(largest.num_tokens, largest.num_patches, largest.num_target_tokens)
        states = STATE_BYTES_PER_PARAM * params.trained + FROZEN_BYTES_PER_PARAM * params.frozen
        kept = memory.kept_bytes(rows, num_microbatches=1)
        return cls(states, kept, memory.peak_bytes(rows, num_microbatches=1, state_bytes=0) - kept)


def hardware_flops(model: ModelConfig, totals: BatchTotals) -> float:
    """FLOPs of one step including full recomputation.  Frozen layers without a backward pass are not recomputed."""
    path, flops = GradientPath.of(model), training_flops(model, totals)
    trained = {(weight.place, weight.layer) for weight in model_weights(model) if not is_frozen(weight, model)}
    recomputes = {Place.VISION_LAYER: model.vision.recompute.granularity == "full",
                  Place.LANGUAGE_LAYER: model.language.recompute.granularity == "full"}  # fmt: skip
    for block in blocks(model, totals):
        needs = path.needs_input_gradient(block.place, block.layer) or (block.place, block.layer) in trained
        flops += block.forward * (recomputes.get(block.place, False) and needs)
    return flops
