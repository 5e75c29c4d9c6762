"""Model FLOPs of a training step, for MFU and for what stages wait.

Counts real tokens and real patches, the ViT included and padding excluded.  Causal attention counts the pairs it
looks at; recomputation does not count, because it is no part of the model.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from mm.batch import BatchTotals, Grid, image_pairs, window_pairs
from mm.config.model import LanguageConfig, ModelConfig, VisionConfig
from mm.parallel.simulation import SlotCost
from mm.weights.table import Place, model_weights, owns
from mm.weights.trained import GradientPath, is_frozen

BlockPlace = tuple[Place, int | None]
"""Place and layer of a block."""


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one forward pass, by part, in order (a multiply-add counts two)."""

    vision: float
    projector: float
    language: float


@dataclass(frozen=True)
class Block:
    """A piece of the model and its forward FLOPs: an embedding, a layer, the projector or the head."""

    place: Place
    layer: int | None
    forward: float


def forward_flops(model: ModelConfig, totals: BatchTotals) -> ForwardFlops:
    """Forward FLOPs of a batch; matrix products only, biases and norms left out."""
    return ForwardFlops(*(sum(block.forward for block in blocks) for blocks in (
        _vision_of(model, totals), [_projector(model, totals)], _language(model.language, totals))))


def image_flops(vision: VisionConfig, grid: Grid) -> float:
    """Forward FLOPs of one image in the ViT."""
    pairs = image_pairs(grid), window_pairs(grid, vision.window_attn_size // vision.patch_size)
    return sum(block.forward for block in _vision(vision, math.prod(grid), *pairs))


def blocks(model: ModelConfig, totals: BatchTotals) -> list[Block]:
    """All that has matrix products, in the order of the forward pass."""
    return [*_vision_of(model, totals), _projector(model, totals), *_language(model.language, totals)]


def training_flops(model: ModelConfig, totals: BatchTotals) -> float:
    """FLOPs of one step."""
    return sum(cost.forward + cost.backward for cost in slot_flops(model, [totals])[0])


def slot_flops(model: ModelConfig, batches: Sequence[BatchTotals]) -> list[list[SlotCost]]:
    """FLOPs of each batch in each slot of the placement.

    A block with a trained matrix costs three forwards, another two where it has adapters or a gradient passes through
    it to something trained before it, else one.  The adapters' own products are not counted.
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


def _vision_of(model: ModelConfig, totals: BatchTotals) -> Iterator[Block]:
    num_patches = totals.num_patches - totals.num_cached_patches
    return _vision(model.vision, num_patches, totals.num_image_pairs, totals.num_window_pairs)


def _vision(
    vision: VisionConfig, num_patches: int, num_image_pairs: int, num_window_pairs: int
) -> Iterator[Block]:
    hidden, full = vision.hidden_size, set(vision.fullatt_block_indexes)
    yield Block(Place.PATCH_EMBEDDING, None, 2.0 * num_patches * vision.patch_elements * hidden)
    linear = 2.0 * num_patches * (4 * hidden**2 + 3 * hidden * vision.ffn_hidden_size)
    for layer in range(vision.num_layers):
        pairs = num_image_pairs if layer in full else num_window_pairs
        yield Block(Place.VISION_LAYER, layer, linear + 4.0 * hidden * pairs)


def _projector(model: ModelConfig, totals: BatchTotals) -> Block:
    merge = model.vision.spatial_merge_size**2
    projector = model.projector
    per_token = projector.input_size * merge * projector.ffn_hidden_size
    per_token += projector.ffn_hidden_size * projector.hidden_size
    return Block(Place.PROJECTOR, None, 2.0 * totals.num_patches / merge * per_token)


def _language(language: LanguageConfig, totals: BatchTotals) -> Iterator[Block]:
    hidden = language.hidden_size
    queries = language.num_attention_heads * language.kv_channels
    keys = language.num_query_groups * language.kv_channels
    per_token = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * language.ffn_hidden_size
    per_layer = 2.0 * totals.num_tokens * per_token + 4.0 * queries * totals.num_causal_pairs
    for layer in range(language.num_layers):
        yield Block(Place.LANGUAGE_LAYER, layer, per_layer)
    # logits are made for target tokens only
    yield Block(Place.HEAD, None, 2.0 * totals.num_target_tokens * hidden * language.vocab_size)
