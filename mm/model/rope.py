"""Rotary position embedding of both towers: cos/sin tables per token, and rotation."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


def mrope_cos_sin(positions: Tensor, head_dim: int, theta: float, section: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tables of the language model's M-RoPE, with the three axes already combined.

    From positions, int [3, num_tokens], to cos and sin, float32 [num_tokens, head_dim] on the same device; both halves
    of the last axis are equal.  Frequency j turns with the time, height or width position according to which of
    ``section``'s three spans it falls into (``mrope_section`` of the model, summing to head_dim / 2).  Equal to the bit
    to transformers' ``Qwen2_5_VLRotaryEmbedding`` in float32, which evaluates all axes at all frequencies.
    """
    if len(section) != 3 or 2 * sum(section) != head_dim:
        raise ValueError(f"mrope_section {tuple(section)} must be three numbers that sum to {head_dim // 2}")
    axis = _section_axis(tuple(section), positions.device)
    frequencies = _inverse_frequencies(head_dim, theta, positions.device)
    return _cos_sin(positions.float().t()[:, axis] * frequencies)


def vision_cos_sin(positions: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Tables of the ViT's rope: the first quarter of a head turns with the row, the second with the column.

    From rows and columns, int [num_patches, 2], to cos and sin as above.  Equal to the bit to transformers'
    ``Qwen2_5_VLVisionRotaryEmbedding``; 10000 is its ``rope_theta``.
    """
    frequencies = _inverse_frequencies(head_dim // 2, theta, positions.device)
    return _cos_sin((positions.float()[..., None] * frequencies).flatten(1))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of ``x``, [num_tokens, num_heads, head_dim]: ``x * cos + rotate_half(x) * sin``.

    It computes in the wider dtype of ``x`` and the tables and returns that of ``x``.  The tables' dtype thus chooses
    the arithmetic of transformers: its ViT rotates in float32 and casts back (pass float32 tables), its language model
    rotates in the dtype of the model (pass tables cast to it).  Forward and gradient are equal to the bit to both.  No
    gradient flows into the tables.
    """
    return _Rotation.apply(x, cos[:, None], sin[:, None])


class _Rotation(torch.autograd.Function):
    """The rotation with its gradient, which is the rotation by the opposite angle.

    Left to autograd, the halves would have to be negated and joined out of place (a quarter slower on the CPU).
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    sin = sin[..., :half]
    rotated = x * cos
    rotated[..., :half] -= x[..., half:] * sin
    rotated[..., half:] += x[..., :half] * sin
    return rotated.to(x.dtype)


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
