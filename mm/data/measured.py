"""What each sample holds, found by reading all of them: text is encoded, of pictures only headers are looked at."""

import numpy as np

from mm.batch import IGNORE_INDEX, image_pairs, window_pairs
from mm.config.model import VisionConfig
from mm.data.dataset import Dataset
from mm.data.encode import SampleEncoder
from mm.data.lengths import Lengths
from mm.errors import UserError


def measured(dataset: Dataset, encoder: SampleEncoder, vision: VisionConfig) -> Lengths:
    """Raises UserError naming the sample that cannot be used."""
    rows = [_counts(dataset, index, encoder, vision) for index in range(len(dataset))]
    tokens, targets, media, patches, full, windows = np.array(rows, dtype=np.int64).T
    return Lengths(tokens.astype(np.int32), targets.astype(np.int32), media.astype(np.int32),
                   patches.astype(np.int32), full, windows)


def _counts(dataset: Dataset, index: int, encoder: SampleEncoder, vision: VisionConfig) -> tuple[int, ...]:
    sample, window = dataset[index], vision.window_attn_size // vision.patch_size
    try:
        grids = tuple(encoder.planned(media).grid for media in sample.media)
        text = encoder.chat.encode(sample.turns, grids)
    except UserError as error:
        raise UserError(f"{sample.source}: {problem}" for problem in error.problems) from error
    kept = [grids[number] for number in text.media]
    return (
        text.token_ids.numel(), int((text.labels != IGNORE_INDEX).sum()), len(kept), sum(t * h * w for t, h, w in kept),
        sum(map(image_pairs, kept)), sum(window_pairs(grid, window) for grid in kept),
    )
