"""Forward FLOPs of Qwen2.5-VL, block by block."""

import math
from collections.abc import Iterator

from mm.batch import BatchTotals, Grid, image_pairs, window_pairs
from mm.config.model import LanguageConfig, ModelConfig, VisionConfig
from mm.model.arithmetic import Block
from mm.weights.table import Place


def blocks(model: ModelConfig, totals: BatchTotals) -> list[Block]:
    """See ``Arithmetic``."""
    return [*_vision_of(model, totals), _projector(model, totals), *_language(model.language, totals)]


def image_flops(vision: VisionConfig, grid: Grid) -> float:
    """See ``Arithmetic``."""
    pairs = image_pairs(grid), window_pairs(grid, vision.window_attn_size // vision.patch_size)
    return sum(block.forward for block in _vision(vision, math.prod(grid), *pairs))


def _vision_of(model: ModelConfig, totals: BatchTotals) -> Iterator[Block]:
    num_patches = totals.num_patches - totals.num_cached_patches
    return _vision(model.vision, num_patches, totals.num_image_pairs, totals.num_window_pairs)


def _vision(
    vision: VisionConfig, num_patches: int, num_image_pairs: int, num_window_pairs: int
) -> Iterator[Block]:
    hidden, full = vision.hidden_size, set(vision.fullatt_block_indexes)
    embedding = 2.0 * num_patches * vision.patch_elements * hidden
    yield Block(Place.PATCH_EMBEDDING, None, "patch embedding", embedding, num_patches)
    linear = 2.0 * num_patches * (4 * hidden**2 + 3 * hidden * vision.ffn_hidden_size)
    for layer in range(vision.num_layers):
        kind, pairs = ("full-attention ViT layer", num_image_pairs) if layer in full else (
            "window-attention ViT layer", num_window_pairs)
        yield Block(Place.VISION_LAYER, layer, kind, linear + 4.0 * hidden * pairs, num_patches, pairs)


def _projector(model: ModelConfig, totals: BatchTotals) -> Block:
    merge = model.vision.spatial_merge_size**2
    projector = model.projector
    per_token = projector.input_size * merge * projector.ffn_hidden_size
    per_token += projector.ffn_hidden_size * projector.hidden_size
    return Block(Place.PROJECTOR, None, "projector", 2.0 * totals.num_patches / merge * per_token, totals.num_patches)


def _language(language: LanguageConfig, totals: BatchTotals) -> Iterator[Block]:
    hidden = language.hidden_size
    queries = language.num_attention_heads * language.kv_channels
    keys = language.num_query_groups * language.kv_channels
    per_token = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * language.ffn_hidden_size
    per_layer = 2.0 * totals.num_tokens * per_token + 4.0 * queries * totals.num_causal_pairs
    tokens, pairs = totals.num_tokens, totals.num_causal_pairs
    yield Block(Place.EMBEDDING, None, "word embedding", 0.0, tokens)  # looks rows up
    for layer in range(language.num_layers):
        yield Block(Place.LANGUAGE_LAYER, layer, "LLM layer", per_layer, tokens, pairs)
    # logits are made for target tokens only
    targets = totals.num_target_tokens
    yield Block(Place.HEAD, None, "norm and head", 2.0 * targets * hidden * language.vocab_size, targets)
