"""Model FLOPs of a training step, for MFU and for balancing the work of stages.

A multiply-add counts as two, and only matrix products count: no biases and norms, and no recomputation, which is not
part of the model.  The ViT is included, padding is not.  Causal attention counts the pairs that it computes.
"""

from collections.abc import Sequence
from functools import cache

from mm.batch import BatchTotals, Grid
from mm.config.model import ModelConfig
from mm.model.arithmetic import Block
from mm.model.families import arithmetic_of
from mm.parallel.simulation import SlotCost
from mm.weights.table import Place, model_weights, owns
from mm.weights.trained import GradientPath, is_frozen

BlockPlace = tuple[Place, int | None]
"""Place and layer of a block."""


def image_flops(model: ModelConfig, grid: Grid) -> float:
    """Forward FLOPs of one image in the ViT."""
    return arithmetic_of(model).image_flops(model.vision, grid)


def blocks(model: ModelConfig, totals: BatchTotals) -> list[Block]:
    """Every block with matrix products, in the order of the forward pass."""
    return arithmetic_of(model).blocks(model, totals)


def training_flops(model: ModelConfig, totals: BatchTotals) -> float:
    """FLOPs of one step."""
    return sum(cost.forward + cost.backward for cost in slot_flops(model, [totals])[0])


def slot_flops(model: ModelConfig, batches: Sequence[BatchTotals]) -> list[list[SlotCost]]:
    """FLOPs of each batch in each slot of the placement.

    A block with a trained matrix costs three forward passes.  Any other block costs two if it has adapters or a
    gradient passes through it to an earlier trained weight, and otherwise one.  The adapters' own products are not
    counted.
    """
    path, slots = GradientPath.of(model), model.placement().slots
    trained, adapted = _trained_blocks(model)
    costs = []
    for totals in batches:
        forward, backward = [0.0] * len(slots), [0.0] * len(slots)
        for block in blocks(model, totals):
            slot = next(number for number, spec in enumerate(slots) if owns(spec, block.place, block.layer))
            passes = path.needs_input_gradient(block.place, block.layer, totals.num_images > 0)
            forward[slot] += block.forward
            place = block.place, block.layer
            backward[slot] += block.forward * (2 if place in trained else 1 if passes or place in adapted else 0)
        costs.append([SlotCost(*both) for both in zip(forward, backward, strict=True)])
    return costs


@cache
def _trained_blocks(model: ModelConfig) -> tuple[set[BlockPlace], set[BlockPlace]]:
    """Which blocks have a trained matrix of their own, and which a trained adapter."""
    matrices = [one for one in model_weights(model) if len(one.shape) > 1 and not is_frozen(one, model)]
    trained = {(one.place, one.layer) for one in matrices if not one.is_adapter}
    adapted = {(one.place, one.layer) for one in matrices if one.is_adapter}
    if model.language.tied and (Place.EMBEDDING, None) in trained:
        trained.add((Place.HEAD, None))
    return trained, adapted
