"""Microbatches of random samples without a loader: packed from samples that are given by their parts or their sizes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mm.batch import IGNORE_INDEX, Grid, Microbatch, Normalisation, normalised
from mm.config.model import ModelConfig
from mm.model.qwen2_5_vl.positions import VideoTimes, mrope_positions
from tests.workload import Sample

if TYPE_CHECKING:
    from mm.parallel.context import Context

NORMALISATION = Normalisation(255.0, (0.5, 0.45, 0.4), (0.27, 0.26, 0.28))
NUM_TEXT_IDS = 200
"""Text is drawn from ids below this: no special token of any model is among them."""


@dataclass(frozen=True)
class RawSample:
    """One unpacked sample."""

    token_ids: Tensor
    is_target: Tensor
    """bool: positions whose token is to be predicted."""
    grids: tuple[Grid, ...]
    pixels: Tensor | None
    """uint8"""
    videos: VideoTimes | None = None
    """None: all grids are pictures."""

    @property
    def pixel_values(self) -> Tensor | None:
        """Normalised, as transformers expects them."""
        return None if self.pixels is None else normalised(self.pixels, NORMALISATION.constants())


def packed(samples: Sequence[RawSample], model: ModelConfig) -> Microbatch:
    """Pack ``samples`` in the order given."""
    labels, positions = [], []
    for sample in samples:
        shifted = torch.full_like(sample.token_ids, IGNORE_INDEX)
        shifted[:-1][sample.is_target[1:]] = sample.token_ids[1:][sample.is_target[1:]]
        labels.append(shifted)
        positions.append(mrope_positions(sample.token_ids, sample.grids, model.image_token_id,
                                         model.vision_start_token_id, model.vision.spatial_merge_size, sample.videos))
    pixels = [sample.pixels for sample in samples if sample.pixels is not None]
    return Microbatch(
        token_ids=torch.cat([sample.token_ids for sample in samples]),
        labels=torch.cat(labels),
        positions=torch.cat(positions, dim=1),
        segment_lengths=tuple(len(sample.token_ids) for sample in samples),
        image_grids=tuple(grid for sample in samples for grid in sample.grids),
        pixel_values=torch.cat(pixels) if pixels else None,
        normalisations=(NORMALISATION,) * sum(len(sample.grids) for sample in samples),
    )


def random_pixels(grids: Sequence[Grid], num_elements: int, generator: torch.Generator) -> Tensor | None:
    """uint8 [patches, ``num_elements``] of all ``grids``; None without any."""
    num_patches = sum(map(math.prod, grids))
    return torch.randint(0, 256, (num_patches, num_elements), generator=generator, dtype=torch.uint8) if grids else None


def random_microbatch(model: ModelConfig, samples: Sequence[Sample], seed: int) -> Microbatch:
    """Packed samples of random pictures followed by random text, whose second half is the answer."""
    generator = torch.Generator().manual_seed(seed)
    return packed([_random_sample(model, *sample, generator) for sample in samples], model)


def _random_sample(model: ModelConfig, grids: tuple[Grid, ...], num_text: int, generator: torch.Generator) -> RawSample:
    start, merge = model.vision_start_token_id, model.vision.spatial_merge_size**2
    spans = [torch.tensor([start, *[model.image_token_id] * (math.prod(grid) // merge), start + 1]) for grid in grids]
    ids = torch.cat([*spans, torch.randint(0, NUM_TEXT_IDS, (num_text,), generator=generator)])
    is_target = torch.arange(len(ids)) > len(ids) - num_text / 2
    return RawSample(ids, is_target, grids, random_pixels(grids, model.vision.patch_elements, generator))


def own_pixels(microbatch: Microbatch, context: "Context") -> Microbatch:
    """``microbatch``, which has the pixels of all images, with only those of this rank of ``Context.encoders``."""
    images = context.images(microbatch)
    if len(images) == len(microbatch.image_grids):
        return microbatch
    assert microbatch.pixel_values is not None, "every image has pixels"
    parts = microbatch.pixel_values.split([math.prod(grid) for grid in microbatch.image_grids])
    own = torch.cat([parts[image] for image in images]) if images else None
    return replace(microbatch, pixel_values=own)
