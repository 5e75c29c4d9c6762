"""What Qwen2.5-VL computes without weights: FLOPs, positions of tokens and patches, rope tables, attention windows.

A *merge unit* is the square of ``spatial_merge_size`` x ``spatial_merge_size`` patches that the projector turns into
one visual token.  The image processor stores the patches of an image unit by unit: frame, row and column of the unit,
then row and column inside it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mm.batch import BatchTotals, Grid, image_pairs, window_pairs
from mm.config.model import LanguageConfig, ModelConfig, VisionConfig
from mm.model.arithmetic import Block, VideoTimes
from mm.model.parallel.rows import Permutation
from mm.weights.table import Place


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


@dataclass(frozen=True, eq=False)
class MergeUnits:
    """The position of every merge unit of some images, one entry per unit in the processor's order (int64, CPU)."""

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
    index = torch.arange(image.numel()) - _starts(counts)[image]
    _, rows, columns = sizes[image].unbind(1)
    line = index // columns
    return MergeUnits(image, line // rows, line % rows, index % columns, sizes)


def mrope_positions(
    token_ids: Tensor, image_grids: Sequence[Grid], image_token_id: int, vision_start_token_id: int,
    spatial_merge_size: int, videos: VideoTimes | None = None,
) -> Tensor:
    """M-RoPE positions of one sample, equal to those of transformers' ``Qwen2_5_VLModel.get_rope_index``.

    ``token_ids``, int64 [num_tokens], has an image or video token per merge unit, each image an unbroken span right
    after a vision start token.  Positions along time, height and width are int64 [3, num_tokens].  Text counts on all
    axes.  The tokens of an image share one base, to which their frame, row and column are added; the text after it
    continues at base + its longer side.  The frames of a video lie ``tokens_per_second`` x seconds apart, rounded down.
    """
    units = merge_units(image_grids, spatial_merge_size)
    is_image = token_ids == image_token_id
    if videos is not None:
        assert len(videos.seconds) == len(image_grids), (videos.seconds, image_grids)
        is_image |= token_ids == videos.video_token_id
    where = is_image.nonzero().flatten()
    counts = units.sizes.prod(dim=1)
    assert where.numel() == int(counts.sum()), (where.numel(), counts.tolist())
    first, last = where[counts.cumsum(0) - counts], where[counts.cumsum(0) - 1]
    assert torch.equal(last - first + 1, counts), (first.tolist(), last.tolist(), counts.tolist())
    assert (token_ids[(first - 1).clamp(min=0)] == vision_start_token_id).all(), first.tolist()
    advance = (~is_image).long()
    advance[last] = units.sizes[:, 1:].amax(dim=1) if len(image_grids) else counts
    positions = (advance.cumsum(0) - advance).repeat(3, 1)
    frame = units.frame if videos is None else _frame_positions(units, videos)
    positions[:, where] += torch.stack((frame, units.row, units.column))
    return positions


def _frame_positions(units: MergeUnits, videos: VideoTimes) -> Tensor:
    """int64: position of each unit's frame on the time axis, counted from the base of its image or video."""
    is_video = torch.tensor([one is not None for one in videos.seconds], dtype=torch.bool)[units.image]
    # transformers multiplies the seconds in float32, and then cuts off the fraction
    seconds = torch.tensor([one or 0.0 for one in videos.seconds], dtype=torch.float32)
    times = units.frame * (videos.tokens_per_second * seconds)[units.image]
    return torch.where(is_video, times.long(), units.frame)


def vision_positions(grids: Sequence[Grid], spatial_merge_size: int) -> Tensor:
    """Row and column of every patch inside its frame: int64 [num_patches, 2], in the processor's order."""
    units = merge_units(grids, spatial_merge_size)
    corner = torch.stack((units.row, units.column), dim=1) * spatial_merge_size
    inside = torch.cartesian_prod(torch.arange(spatial_merge_size), torch.arange(spatial_merge_size)).reshape(-1, 2)
    return (corner[:, None] + inside).reshape(-1, 2)


@dataclass(frozen=True, eq=False)
class VisionPlan:
    """Everything about the images of one microbatch that the ViT needs (CPU tensors).

    *Processor's order* is that of ``pixel_values``.  *Window order* is that in which patches run through the ViT:
    window by window, the largest windows of the whole microbatch first, so that a kernel can take all windows of one
    length as one batch.

    Every ViT layer of a microbatch must use the same plan, whichever pipeline stage holds it: it is a function of the
    grids alone.
    """

    patch_order: Permutation
    """[num_patches]: from the processor's order to window order."""
    token_restore: Permutation
    """[num_visual_tokens]: from the order of the projector's output back to reading order."""
    window_lengths: tuple[int, ...]
    """Patches of each window, in window order; never increasing."""
    image_lengths: tuple[int, ...]
    """Patches of each frame of each image, in reading order: the segments of full attention."""
    image_order: Permutation | None
    """[num_patches]: from window order to frame by frame, for the full-attention layers (the order inside a frame is
    free); None if they are already in that order."""
    positions: Tensor
    """int64 [num_patches, 2]: row and column of each patch, in window order."""


def plan_vision(grids: Sequence[Grid], patch_size: int, spatial_merge_size: int, window_attn_size: int) -> VisionPlan:
    """Order the patches of ``grids`` by attention window.

    A window is a square of ``window_attn_size`` pixels of one frame, cut off at the right and bottom edges.  The sets
    of patches are those of transformers' ``get_vision_window_index``; only the order of the windows differs.
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
    unit_order = Permutation.of(window_order).inverse[window_of_unit].argsort(stable=True)
    patch_order = _patches(unit_order, patches_per_unit)

    by_frame = frame_of_unit[unit_order].argsort(stable=True)
    is_identity = torch.equal(by_frame, torch.arange(by_frame.numel()))
    return VisionPlan(
        patch_order=Permutation.of(patch_order), token_restore=Permutation.of(unit_order).reversed(),
        window_lengths=tuple((lengths * patches_per_unit).tolist()),
        image_lengths=tuple(height * width for time, height, width in grids for _ in range(time)),
        image_order=None if is_identity else Permutation.of(_patches(by_frame, patches_per_unit)),
        positions=vision_positions(grids, spatial_merge_size)[patch_order])


def _starts(counts: Tensor) -> Tensor:
    return counts.cumsum(0) - counts


def _patches(unit_order: Tensor, patches_per_unit: int) -> Tensor:
    """The order of patches that follows from an order of merge units."""
    return (unit_order[:, None] * patches_per_unit + torch.arange(patches_per_unit)).flatten()


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
