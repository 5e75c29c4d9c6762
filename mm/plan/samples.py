"""Microbatches of stated sizes for measurements: random tokens and pixels, of which only the sizes matter."""

import math
from collections.abc import Sequence

import torch

from mm.batch import IGNORE_INDEX, Grid, Microbatch, Normalisation
from mm.config.model import ModelConfig
from mm.model.arithmetic import VideoTimes
from mm.model.families import arithmetic_of

_NORMALISATION = Normalisation(255.0, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
_FIRST_IDS = 16
"""Text has ids below this: every vocabulary has them, and no control token is among them."""


def random_microbatch(model: ModelConfig, samples: Sequence[tuple[Sequence[Grid], int]]) -> Microbatch:
    """Pack ``samples``: the grids of each one's images, and the number of text tokens, all targets, that follow."""
    generator = torch.Generator().manual_seed(len(samples))
    merge_size, start = model.vision.spatial_merge_size, model.vision_start_token_id
    token_ids, labels, positions = [], [], []
    for grids, num_text_tokens in samples:
        images = [torch.tensor([start, *[model.image_token_id] * (math.prod(grid) // merge_size**2)])
                  for grid in grids]
        text = torch.randint(0, _FIRST_IDS, (num_text_tokens,), generator=generator)
        ids = torch.cat([*images, text])
        num_image_tokens = len(ids) - num_text_tokens
        token_ids.append(ids)
        labels.append(torch.cat([torch.full((num_image_tokens,), IGNORE_INDEX), text.roll(-1)]))
        positions.append(arithmetic_of(model).positions(
            ids, tuple(grids), model.image_token_id, start, merge_size,
            VideoTimes(model.video_token_id, model.vision.tokens_per_second, (None,) * len(grids))))
    all_grids = tuple(grid for grids, _ in samples for grid in grids)
    shape = sum(map(math.prod, all_grids)), model.vision.patch_elements
    return Microbatch(
        token_ids=torch.cat(token_ids), labels=torch.cat(labels), positions=torch.cat(positions, dim=1),
        segment_lengths=tuple(map(len, token_ids)), image_grids=all_grids,
        pixel_values=torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) if all_grids else None,
        normalisations=(_NORMALISATION,) * len(all_grids),
    )
