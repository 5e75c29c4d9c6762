"""Rotary position embedding of both towers: positions, cos/sin tables, rotation.

Pure functions on tensors.  Knows nothing of modules, devices, packing or parallelism: ``mrope_positions`` sees one
sample, the tables are per token, and whoever packs tokens concatenates them.

Notation: a *merge unit* is the square of ``spatial_merge_size`` x ``spatial_merge_size`` patches that the projector
turns into one visual token.  The image processor stores the patches of an image unit by unit: frame, row and column
of the unit, then row and column inside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mm.batch import Grid
from mm.errors import UserError


@dataclass(frozen=True, eq=False)
class MergeUnits:
    """Where every merge unit of some images lies, one entry per unit in the processor's order (int64, CPU)."""

    image: Tensor
    """Index of the unit's image in ``grids``."""
    frame: Tensor
    row: Tensor
    """In merge units, not patches; so is ``column``."""
    column: Tensor
    sizes: Tensor
    """int64 [num_images, 3]: frames, rows and columns of each image in merge units."""


def merge_units(grids: Sequence[Grid], spatial_merge_size: int) -> MergeUnits:
    """Enumerate the merge units of ``grids`` (in patches; both sides must be multiples of ``spatial_merge_size``)."""
    patches = torch.tensor(list(grids), dtype=torch.int64).reshape(-1, 3)
    if (patches[:, 1:] % spatial_merge_size).any():
        raise ValueError(f"sides of {list(grids)} must be multiples of spatial_merge_size = {spatial_merge_size}")
    sizes = patches // torch.tensor([1, spatial_merge_size, spatial_merge_size])
    counts = sizes.prod(dim=1)
    image = torch.repeat_interleave(counts)
    index = torch.arange(image.numel()) - (counts.cumsum(0) - counts)[image]
    columns = sizes[:, 2][image]
    rows = sizes[:, 1][image]
    line = index // columns
    frame = line // rows
    return MergeUnits(image, frame, line - frame * rows, index - line * columns, sizes)


def mrope_positions(
    token_ids: Tensor,
    image_grids: Sequence[Grid],
    image_token_id: int,
    vision_start_token_id: int,
    spatial_merge_size: int,
) -> Tensor:
    """M-RoPE positions of one sample, as transformers' ``Qwen2_5_VLModel.get_rope_index`` gives them for images.

    Text counts 1, 2, 3, ... on all three axes.  The tokens of an image share one base position, to which their frame,
    row and column (in merge units) are added; the text after it goes on at base + the longer side of the image.

    Args:
        token_ids: int64 [num_tokens], one unpadded sample with an image token per merge unit.
        image_grids: the images of the sample, in the order in which they appear.

    Returns:
        int64 [3, num_tokens]: positions along time, height and width.

    Raises:
        UserError: the image tokens do not match the grids (an image cut by truncation, a stray image token), or an
            image does not directly follow a vision start token.  transformers 4 finds images by that token and
            transformers 5 by the runs of image tokens; with this check both give the same positions.
    """
    units = merge_units(image_grids, spatial_merge_size)
    is_image = token_ids == image_token_id
    where = is_image.nonzero().flatten()
    counts = units.sizes.prod(dim=1)
    _check_image_tokens(token_ids, where, counts, vision_start_token_id)

    last = where[counts.cumsum(0) - 1]
    advance = (~is_image).long()
    advance[last] = units.sizes[:, 1:].amax(dim=1) if len(image_grids) else counts
    positions = (advance.cumsum(0) - advance).repeat(3, 1)
    positions[:, where] += torch.stack((units.frame, units.row, units.column))
    return positions


def _check_image_tokens(token_ids: Tensor, where: Tensor, counts: Tensor, vision_start_token_id: int) -> None:
    """Raise unless image i is an unbroken span of ``counts[i]`` image tokens right after a vision start token."""
    expected = int(counts.sum())
    if where.numel() != expected:
        raise UserError(
            f"A sample of {token_ids.numel()} tokens holds {where.numel()} image tokens, but its {counts.numel()} "
            f"images need {expected} ({counts.tolist()}); the text must name each image exactly once and must not be "
            f"cut inside an image: raise the sequence length or lower image_max_pixels"
        )
    end = counts.cumsum(0)
    first, last = where[end - counts], where[end - 1]
    broken = (last - first + 1 != counts) | (token_ids[(first - 1).clamp(min=0)] != vision_start_token_id)
    if broken.any():
        image = int(broken.nonzero()[0])
        raise UserError(
            f"Image {image} of a sample should fill {int(counts[image])} tokens directly after a vision start token "
            f"(id {vision_start_token_id}), but its image tokens lie at {int(first[image])}..{int(last[image])} after "
            f"token id {int(token_ids[max(int(first[image]) - 1, 0)])}; use the chat template of Qwen2.5-VL"
        )


def mrope_cos_sin(positions: Tensor, head_dim: int, theta: float, section: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tables of the language model's M-RoPE, with the three axes already combined.

    Frequency j turns with the time, height or width position according to which of ``section``'s three spans it
    falls into (``mrope_section`` of the model, summing to head_dim / 2).  Equal to the bit to transformers'
    ``Qwen2_5_VLRotaryEmbedding`` in float32, which evaluates all axes at all frequencies and then picks.

    Args:
        positions: int [3, num_tokens]; the tables are made on its device.

    Returns:
        cos and sin, float32 [num_tokens, head_dim]; both halves of the last axis are equal.
    """
    if len(section) != 3 or 2 * sum(section) != head_dim:
        raise ValueError(f"mrope_section {tuple(section)} must be three numbers that sum to {head_dim // 2}")
    axis = _section_axis(tuple(section), positions.device)
    frequencies = _inverse_frequencies(head_dim, theta, positions.device)
    return _cos_sin(positions.float().t()[:, axis] * frequencies)


def vision_positions(grids: Sequence[Grid], spatial_merge_size: int) -> Tensor:
    """Row and column of every patch inside its frame: int64 [num_patches, 2], in the processor's order."""
    units = merge_units(grids, spatial_merge_size)
    corner = torch.stack((units.row, units.column), dim=1) * spatial_merge_size
    inside = torch.cartesian_prod(torch.arange(spatial_merge_size), torch.arange(spatial_merge_size)).reshape(-1, 2)
    return (corner[:, None] + inside).reshape(-1, 2)


def vision_cos_sin(positions: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Tables of the ViT's rope: the first quarter of a head turns with the row, the second with the column.

    Equal to the bit to transformers' ``Qwen2_5_VLVisionRotaryEmbedding``; 10000 is its ``rope_theta``.

    Args:
        positions: int [num_patches, 2], row and column; the tables are made on its device.

    Returns:
        cos and sin, float32 [num_patches, head_dim]; both halves of the last axis are equal.
    """
    frequencies = _inverse_frequencies(head_dim // 2, theta, positions.device)
    return _cos_sin((positions.float()[..., None] * frequencies).flatten(1))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of ``x``: ``x * cos + rotate_half(x) * sin``, in the wider dtype of ``x`` and the tables.

    The dtype of the tables thus chooses the arithmetic of transformers: its ViT rotates in float32 and casts back
    (pass float32 tables), its language model rotates in the dtype of the model (pass tables cast to it).  Forward
    and gradient are equal to the bit to both.

    Args:
        x: [num_tokens, num_heads, head_dim].
        cos, sin: [num_tokens, head_dim], with equal halves; no gradient flows into them.

    Returns:
        Like ``x``, in its dtype.
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
