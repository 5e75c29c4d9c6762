"""Attention windows of the ViT: in which order its patches run, and where windows and images begin and end.

Pure, host side.  Knows nothing of the model, kernels or devices.  The same plan must be used by every ViT layer of a
microbatch, whichever pipeline stage it lives on: it is a function of the grids alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mm.batch import Grid
from mm.model.rope import merge_units, vision_positions


@dataclass(frozen=True, eq=False)
class VisionPlan:
    """Everything about the images of one microbatch that the ViT needs (CPU tensors).

    *Processor's order* is that of ``pixel_values``.  *Window order* is that in which patches run through the ViT:
    window by window, the largest windows of the whole microbatch first, so that a kernel can take all windows of one
    length as one batch.
    """

    patch_order: Tensor
    """int64 [num_patches]: row i of the window order is patch ``patch_order[i]`` of the processor's order."""
    token_restore: Tensor
    """int64 [num_visual_tokens]: ``x[token_restore]`` puts the projector's output back in reading order."""
    window_lengths: tuple[int, ...]
    """Patches of each window, in window order; never increasing."""
    image_lengths: tuple[int, ...]
    """Patches of each frame of each image, in reading order: the segments of full attention."""
    image_order: Tensor | None
    """int64 [num_patches]: ``x[image_order]`` gathers rows in window order frame by frame for the full-attention
    layers (the order inside a frame is free); None when they already lie so."""
    image_restore: Tensor | None
    """The inverse of ``image_order``."""
    positions: Tensor
    """int64 [num_patches, 2]: row and column of each patch, in window order."""


def plan_vision(grids: Sequence[Grid], patch_size: int, spatial_merge_size: int, window_attn_size: int) -> VisionPlan:
    """Order the patches of ``grids`` by attention window.

    A window is a square of ``window_attn_size`` pixels of one frame, cut off at the right and bottom edges: 8 x 8
    patches for the published 112 and 14.  The sets of patches are those of transformers' ``get_vision_window_index``;
    only the order of the windows differs (attention does not depend on it, and ``token_restore`` undoes it).
    No images give an empty plan.
    """
    units = merge_units(grids, spatial_merge_size)
    side = window_attn_size // spatial_merge_size // patch_size
    patches_per_unit = spatial_merge_size**2

    frames, rows, columns = units.sizes.unbind(1)
    window_rows, window_columns = (rows + side - 1) // side, (columns + side - 1) // side
    frame_of_unit = _starts(frames)[units.image] + units.frame
    window_of_unit = (
        _starts(frames * window_rows * window_columns)[units.image]
        + (units.frame * window_rows[units.image] + units.row // side) * window_columns[units.image]
        + units.column // side
    )
    lengths, window_order = torch.bincount(window_of_unit).sort(descending=True, stable=True)
    unit_order = _inverse(window_order)[window_of_unit].argsort(stable=True)
    patch_order = _patches(unit_order, patches_per_unit)

    by_frame = frame_of_unit[unit_order].argsort(stable=True)
    is_identity = torch.equal(by_frame, torch.arange(by_frame.numel()))
    return VisionPlan(
        patch_order=patch_order,
        token_restore=_inverse(unit_order),
        window_lengths=tuple((lengths * patches_per_unit).tolist()),
        image_lengths=tuple(height * width for time, height, width in grids for _ in range(time)),
        image_order=None if is_identity else _patches(by_frame, patches_per_unit),
        image_restore=None if is_identity else _patches(_inverse(by_frame), patches_per_unit),
        positions=vision_positions(grids, spatial_merge_size)[patch_order],
    )


def _starts(counts: Tensor) -> Tensor:
    return counts.cumsum(0) - counts


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.numel())
    return inverse


def _patches(unit_order: Tensor, patches_per_unit: int) -> Tensor:
    """The order of patches that an order of merge units stands for."""
    return (unit_order[:, None] * patches_per_unit + torch.arange(patches_per_unit)).flatten()
