"""Model FLOPs of a training step, for MFU.

Counts real tokens and real patches, the ViT included and padding excluded.  Causal attention counts the pairs it
looks at; recomputation does not count, because it is no part of the model.
"""

import math
from dataclasses import dataclass

from mm.batch import BatchTotals, Grid, image_pairs, window_pairs
from mm.config.model import LanguageConfig, ModelConfig, VisionConfig


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one forward pass, by part, in order (a multiply-add counts two)."""

    vision: float
    projector: float
    language: float


def forward_flops(model: ModelConfig, totals: BatchTotals) -> ForwardFlops:
    """Forward FLOPs of a batch; matrix products only, biases and norms left out."""
    vision = _vision(model.vision, totals.num_patches, totals.num_image_pairs, totals.num_window_pairs)
    return ForwardFlops(vision, _projector(model, totals), _language(model.language, totals))


def image_flops(vision: VisionConfig, grid: Grid) -> float:
    """Forward FLOPs of one image in the ViT."""
    pairs = image_pairs(grid), window_pairs(grid, vision.window_attn_size // vision.patch_size)
    return _vision(vision, math.prod(grid), *pairs)


def training_flops(model: ModelConfig, totals: BatchTotals) -> float:
    """FLOPs of one step: a trainable part costs three forwards, a frozen one two where a gradient passes through it
    to something trainable before it, else one."""
    flops, gradient_passes = 0.0, False
    for part, forward in vars(forward_flops(model, totals)).items():
        trains = not model.is_frozen(part)
        flops += forward * (3 if trains else 2 if gradient_passes else 1)
        gradient_passes = gradient_passes or trains
    return flops


def _vision(vision: VisionConfig, num_patches: int, num_image_pairs: int, num_window_pairs: int) -> float:
    hidden = vision.hidden_size
    num_full = len(vision.fullatt_block_indexes)
    per_patch = vision.num_layers * (4 * hidden**2 + 3 * hidden * vision.ffn_hidden_size)
    per_patch += vision.patch_elements * hidden
    pairs = num_full * num_image_pairs + (vision.num_layers - num_full) * num_window_pairs
    return 2.0 * num_patches * per_patch + 4.0 * hidden * pairs


def _projector(model: ModelConfig, totals: BatchTotals) -> float:
    merge = model.vision.spatial_merge_size**2
    projector = model.projector
    per_token = projector.input_size * merge * projector.ffn_hidden_size
    per_token += projector.ffn_hidden_size * projector.hidden_size
    return 2.0 * totals.num_patches / merge * per_token


def _language(language: LanguageConfig, totals: BatchTotals) -> float:
    hidden = language.hidden_size
    queries = language.num_attention_heads * language.kv_channels
    keys = language.num_query_groups * language.kv_channels
    per_layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * language.ffn_hidden_size
    linear = totals.num_tokens * language.num_layers * per_layer
    head = totals.num_target_tokens * hidden * language.vocab_size  # logits are made for target tokens only
    return 2.0 * (linear + head) + 4.0 * language.num_layers * queries * totals.num_causal_pairs
