"""Types that data, engine and model share: a packed microbatch, the totals of a batch, the plan of a step."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import reduce
from itertools import zip_longest
from operator import or_

import torch
from torch import Tensor

from mm.config.model import VisionConfig

IGNORE_INDEX = -100
"""Label of a position that has no loss (torch's and transformers' convention)."""

Grid = tuple[int, int, int]
"""Patches of one image or video along time, height and width.  A grid with more than one temporal slice is a video.  It
counts as an image everywhere, because the ViT processes its temporal slices separately."""


@dataclass(frozen=True)
class Normalisation:
    """How an image's bytes become numbers, by channel: (byte / divisor - mean) / std.

    Videos have the divisor 1, and mean and std 255 times the checkpoint's, to match transformers' rounding.
    """

    divisor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def constants(self) -> Tensor:
        """float32 [3, 3, 1]: divisor, mean and std, for ``normalised``."""
        return torch.tensor([(self.divisor,) * 3, self.mean, self.std]).unsqueeze(-1)


_ROWS_AT_A_TIME = 16_384
"""Patches normalised together; their float32 values take 77 MB in addition to the result."""


def normalised(
    patches: Tensor, constants: Tensor, dtype: torch.dtype = torch.float32, into: Tensor | None = None
) -> Tensor:
    """Bytes [num_patches, 3 x frames x side x side] as numbers, rounded to ``dtype`` at the end; ``into``: where to.

    Three roundings in float32, not one fused multiply-add, as in transformers' numpy code.  Divisors are tensors,
    because CUDA replaces a division by a Python number with a product with its reciprocal.
    """
    numbers = torch.empty(patches.shape, dtype=dtype, device=patches.device) if into is None else into
    divisor, mean, std = constants
    for start in range(0, len(patches), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        values = patches[rows].view(-1, 3, patches.shape[1] // 3).float().div_(divisor).sub_(mean).div_(std)
        numbers[rows] = values.flatten(1)
    return numbers


@dataclass(frozen=True)
class Microbatch:
    """Samples packed one after another as segments; nothing is padded, and all tensors are on the CPU."""

    token_ids: Tensor
    """int64 [num_tokens]"""
    labels: Tensor
    """int64 [num_tokens]; ``labels[i]`` is the token that should follow ``token_ids[i]``, or ``IGNORE_INDEX``.
    Already shifted, within each segment."""
    positions: Tensor
    """int64 [3, num_tokens]: M-RoPE positions along time, height and width, from 0 in each segment."""
    segment_lengths: tuple[int, ...]
    """Tokens of each sample."""
    image_grids: tuple[Grid, ...]
    """In the order of the images in ``token_ids``."""
    pixel_values: Tensor | None
    """uint8 [num_patches, channels x frames x height x width].  In a ``StepPlan``, only for the images that
    ``image_ranks`` gives this rank; None without images, and on every rank without the patch embedding."""
    num_omitted_images: int = 0
    """Images left out because ``--seq-length`` would have cut them; known only to the rank that reads the data."""
    image_ranks: tuple[int, ...] = ()
    """The rank of ``Context.encoders`` that holds each image, in a ``StepPlan`` with its pixels; () if these are a
    single rank."""
    samples: tuple[int, ...] = ()
    """The numbers of its samples in the data, in order, counted from 0; empty if they are not known."""
    normalisations: tuple[Normalisation, ...] = ()
    """The normalisation of the pixels of each of ``image_grids``."""
    feature_bytes: int = 0
    """Bytes per patch of the stored ViT features, if those of all images are stored and the ViT is skipped; else 0."""
    features: Tensor | None = None
    """uint8 [num_patches, feature_bytes]: stored ViT features, instead of ``pixel_values`` and in their order.  In a
    ``StepPlan``, only for the images that ``image_ranks`` gives this rank; None on every rank without the projector."""
    feature_keys: tuple[str, ...] = ()
    """For each image, 32 hexadecimal digits under which its ViT features are to be stored, or "" if they already are;
    () if nothing is to be stored."""

    @classmethod
    def join(cls, microbatches: Iterable["Microbatch"]) -> "Microbatch":
        """Concatenate microbatches, shortest first: adjacent segments of equal length share one attention call."""
        ordered = sorted(microbatches, key=lambda one: one.num_tokens)
        pixels = [one.pixel_values for one in ordered if one.pixel_values is not None]
        features = [one.features for one in ordered if one.features is not None]
        return cls(
            token_ids=torch.cat([one.token_ids for one in ordered]),
            labels=torch.cat([one.labels for one in ordered]),
            positions=torch.cat([one.positions for one in ordered], dim=1),
            segment_lengths=tuple(length for one in ordered for length in one.segment_lengths),
            image_grids=tuple(grid for one in ordered for grid in one.image_grids),
            pixel_values=torch.cat(pixels) if pixels else None,
            num_omitted_images=sum(one.num_omitted_images for one in ordered),
            samples=tuple(number for one in ordered for number in one.samples),
            normalisations=tuple(rule for one in ordered for rule in one.normalisations),
            feature_bytes=max(one.feature_bytes for one in ordered),
            features=torch.cat(features) if features else None,
            feature_keys=tuple(key for one in ordered for key in one.feature_keys),
        )

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def num_patches(self) -> int:
        return sum(t * h * w for t, h, w in self.image_grids)

    @property
    def skips_vision(self) -> bool:
        """Whether its images have stored ``features``, so that the ViT is skipped."""
        return self.feature_bytes > 0

    @property
    def num_target_tokens(self) -> int:
        return int((self.labels != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class BatchTotals:
    """Counts over a global batch.  Each is a sum, so the counts of the replicas add up to those of the batch."""

    num_tokens: int
    num_patches: int
    num_images: int
    num_omitted_images: int
    """Images left out because ``--seq-length`` would have cut them."""
    num_target_tokens: int
    num_target_samples: int
    """Samples with at least one target token."""
    num_microbatches: int
    num_causal_pairs: int
    """Pairs (query, key) in the LLM's attention: s (s + 1) / 2 for each sample of s tokens."""
    num_image_pairs: int
    """Pairs in full-attention ViT layers: squares of the patches of each image's temporal slices."""
    num_window_pairs: int
    """Pairs in window-attention ViT layers."""
    num_cached_images: int = 0
    """Images that skip the ViT; none of their patches has pairs."""
    num_cached_patches: int = 0

    @classmethod
    def of(cls, microbatches: list[Microbatch], vision: VisionConfig) -> "BatchTotals":
        cached = [m for m in microbatches if m.skips_vision]
        computed = [grid for m in microbatches if not m.skips_vision for grid in m.image_grids]
        window = vision.window_attn_size // vision.patch_size
        return cls(
            num_tokens=sum(m.num_tokens for m in microbatches),
            num_patches=sum(m.num_patches for m in microbatches),
            num_images=sum(len(m.image_grids) for m in microbatches),
            num_omitted_images=sum(m.num_omitted_images for m in microbatches),
            num_target_tokens=sum(m.num_target_tokens for m in microbatches),
            num_target_samples=sum(int((targets_per_segment(m) > 0).sum()) for m in microbatches),
            num_microbatches=len(microbatches),
            num_causal_pairs=sum(s * (s + 1) // 2 for m in microbatches for s in m.segment_lengths),
            num_image_pairs=sum(map(image_pairs, computed)),
            num_window_pairs=sum(window_pairs(grid, window) for grid in computed),
            num_cached_images=sum(len(m.image_grids) for m in cached),
            num_cached_patches=sum(m.num_patches for m in cached),
        )


NO_SAMPLES = BatchTotals(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""The totals of nothing."""


def targets_per_segment(microbatch: Microbatch) -> Tensor:
    """int64 [num_segments]: target tokens of each sample."""
    lengths = torch.tensor(microbatch.segment_lengths, dtype=torch.int64)
    segments = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    is_target = (microbatch.labels != IGNORE_INDEX).long()
    return torch.zeros_like(lengths).index_add_(0, segments, is_target)


def encoder_batches_of(microbatches: Sequence[Microbatch], size: int) -> list[tuple[int, ...]]:
    """``encoder_batches`` of ``microbatches``."""
    return encoder_batches([one.skips_vision if one.image_grids else None for one in microbatches], size)


def encoder_batches(skip_vision: Sequence[bool | None], size: int) -> list[tuple[int, ...]]:
    """The numbers of the microbatches whose images pass the ViT together, of every ``size`` consecutive ones.

    ``skip_vision``: whether each skips the ViT, None without images.  Those that do pass only the projector, together.
    """
    found: dict[tuple[int, bool], list[int]] = {}
    for number, skips in enumerate(skip_vision):
        if skips is not None:
            found.setdefault((number // size, skips), []).append(number)
    return [tuple(batch) for batch in found.values()]


class Images(IntFlag):
    """What happens to images in the forward and backward pass of a microbatch."""

    NONE = 0
    PROJECTED = 1
    """Images, of this microbatch or of several, pass the projector in its forward pass."""
    ENCODED = 2
    """They pass the ViT first."""
    BACKWARD = 4
    """Gradients of images flow back in its backward pass."""


def image_passes(microbatches: Sequence[Microbatch], size: int) -> tuple[Images, ...]:
    """``Images`` of each microbatch; ``size``: as in ``encoder_batches``.

    Images that pass the ViT together do so in the forward pass of their first microbatch, and their gradients flow back
    in the backward pass of their last.
    """
    found = [Images.NONE] * len(microbatches)
    for batch in encoder_batches_of(microbatches, size):
        is_encoded = not microbatches[batch[0]].skips_vision
        found[batch[0]] |= Images.PROJECTED | (Images.ENCODED if is_encoded else Images.NONE)
        found[batch[-1]] |= Images.BACKWARD
    return tuple(found)


def passes_of_any(replicas: Iterable[Sequence[Images]]) -> tuple[Images, ...]:
    """The union of the replicas' ``image_passes``, for each microbatch; some replicas may have fewer microbatches."""
    return tuple(reduce(or_, passes) for passes in zip_longest(*replicas, fillvalue=Images.NONE))


def image_pairs(grid: Grid) -> int:
    """Pairs of patches in a full-attention layer of the ViT, which processes each temporal slice separately."""
    t, h, w = grid
    return t * (h * w) ** 2


def window_pairs(grid: Grid, window: int) -> int:
    """Pairs of patches in a layer with windows of ``window`` patches a side; the last ones of a side may be smaller."""
    t, *sides = grid
    return t * math.prod(window**2 * (side // window) + (side % window) ** 2 for side in sides)


def samples_text(samples: tuple[int, ...]) -> str:
    """The end of a sentence that names a microbatch's ``samples``; empty if they are not known."""
    return f" (samples {' '.join(map(str, samples))})" if samples else ""


@dataclass(frozen=True)
class StepPlan:
    """Everything about one optimizer step that every rank of a replica knows before it begins."""

    microbatches: tuple[Microbatch, ...]
    totals: BatchTotals
    """Over the global batch, all replicas together."""
    dropout_seed: int | None = None
    """Seed of this step's dropout; None: nothing is dropped."""
    image_passes: tuple[Images, ...] | None = None
    """``passes_of_any`` of all replicas' ``image_passes``; None unless the run shards gradients, which needs it."""
