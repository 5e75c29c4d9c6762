"""Rotary position embedding of both towers: cos/sin tables per token.  ``mm.device.pointwise`` rotates by them."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


def mrope_cos_sin(positions: Tensor, head_dim: int, theta: float, section: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tables of the language model's M-RoPE, with the three axes already combined.

    From positions, int [3, num_tokens], to cos and sin, float32 [num_tokens, head_dim]; both halves of the last axis
    are equal.  Frequency j turns with the axis of ``section`` (``mrope_section``) that it falls into.  Equal to the bit
    to transformers' ``Qwen2_5_VLRotaryEmbedding`` in float32.
    """
    if len(section) != 3 or 2 * sum(section) != head_dim:
        raise ValueError(f"mrope_section {tuple(section)} must be three numbers that sum to {head_dim // 2}")
    axis = _section_axis(tuple(section), positions.device)
    frequencies = _inverse_frequencies(head_dim, theta, positions.device)
    return _cos_sin(positions.float().t()[:, axis] * frequencies)


def vision_cos_sin(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Tables of the ViT's rope: the first quarter of a head turns with the row, the second with the column.

    From rows and columns, int [num_patches, 2], to cos and sin as above.  Equal to the bit to transformers'
    ``Qwen2_5_VLVisionRotaryEmbedding``; 10000 is its ``rope_theta``.
    """
    frequencies = _inverse_frequencies(head_dim // 2, 10000.0, positions.device)
    return _cos_sin((positions.float()[..., None] * frequencies).flatten(1))


@cache
def _inverse_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """float32 [dim / 2], computed on the CPU and written as in transformers so that the last bit agrees."""
    return (1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))).to(device)


@cache
def _section_axis(section: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [head_dim / 2]: which of time, height and width each frequency turns with."""
    return torch.repeat_interleave(torch.arange(3), torch.tensor(section)).to(device)


def _cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
