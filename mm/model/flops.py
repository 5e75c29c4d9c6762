"""Model FLOPs of a training step, for MFU and for balancing the work of stages.

Only matrix products count, a multiply-add as two, without recomputation and padding; causal attention counts the pairs
that it computes.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache

from mm.batch import NO_SAMPLES, BatchTotals, Grid
from mm.config.model import ModelConfig
from mm.model.arithmetic import Block
from mm.model.families import arithmetic_of
from mm.parallel.pipeline_schedule import SlotCost
from mm.weights.table import Place, model_weights
from mm.weights.trained import GradientPath, is_frozen

BlockPlace = tuple[Place, int | None]
"""Place and layer of a block."""


class Backward(Enum):
    """What a block's backward pass computes: its FLOPs as a number of forward passes, and a name for it."""

    NOTHING = (0, "nothing")
    INPUT = (1, "the gradient of the input")
    ADAPTERS = (1, "the gradients of the input and of adapters")
    WEIGHTS = (2, "the gradients of the input and of the weights")

    @property
    def num_forward(self) -> int:
        return self.value[0]


def image_flops(model: ModelConfig, grid: Grid) -> float:
    """Forward FLOPs of one image in the ViT."""
    return arithmetic_of(model).image_flops(model.vision, grid)


def blocks(model: ModelConfig, totals: BatchTotals) -> list[Block]:
    """Every block, in the order of the forward pass."""
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
    slots = slots_of(model)
    backwards = {has_images: block_backwards(model, has_images) for has_images in (False, True)}
    costs = []
    for totals in batches:
        forward, backward = ([0.0] * len(model.placement().slots) for _ in range(2))
        for block in blocks(model, totals):
            place = block.place, block.layer
            forward[slots[place]] += block.forward
            backward[slots[place]] += block.forward * backwards[totals.num_images > 0][place].num_forward
        costs.append([SlotCost(*both) for both in zip(forward, backward, strict=True)])
    return costs


@cache
def slots_of(model: ModelConfig) -> Mapping[BlockPlace, int]:
    """The slot of each block of ``model``."""
    found: dict[BlockPlace, int] = {}
    for slot, spec in enumerate(model.placement().slots):
        for place in Place:
            held = getattr(spec, place.value)
            found |= dict.fromkeys(((place, layer) for layer in held) if isinstance(held, range) else
                                   [(place, None)] * held, slot)
    return {place: found[place] for place in _block_places(model)}


@cache
def block_backwards(model: ModelConfig, has_images: bool) -> Mapping[BlockPlace, Backward]:
    """What each block computes in the backward pass of a microbatch with or without images."""
    path, (trained, adapted) = GradientPath.of(model), _trained_blocks(model)

    def backward(place: BlockPlace) -> Backward:
        if place in trained:
            return Backward.WEIGHTS
        if place in adapted:
            return Backward.ADAPTERS
        return Backward.INPUT if path.needs_input_gradient(*place, has_images) else Backward.NOTHING

    return {place: backward(place) for place in _block_places(model)}


@cache
def _block_places(model: ModelConfig) -> tuple[BlockPlace, ...]:
    return tuple((block.place, block.layer) for block in blocks(model, NO_SAMPLES))


@cache
def _trained_blocks(model: ModelConfig) -> tuple[set[BlockPlace], set[BlockPlace]]:
    """Which blocks have a trained matrix of their own, and which a trained adapter."""
    matrices = [one for one in model_weights(model) if len(one.shape) > 1 and not is_frozen(one, model)]
    trained = {(one.place, one.layer) for one in matrices if not one.is_adapter}
    adapted = {(one.place, one.layer) for one in matrices if one.is_adapter}
    if model.language.tied and (Place.EMBEDDING, None) in trained:
        trained.add((Place.HEAD, None))
    return trained, adapted
