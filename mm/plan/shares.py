"""What each rank of a stage computes of a microbatch: an even share of its tokens, and whole images."""

import numpy as np

from mm.plan.costs import COUNTS

_OF_IMAGES = ("num_patches", "num_image_pairs", "num_window_pairs")
"""Counts that are divided over ranks by whole images."""


def divided(counts: np.ndarray, num_ranks: int, num_encoders: int) -> np.ndarray:
    """The costliest share of each microbatch: tokens are divided evenly over ``num_ranks``, and whole images of about
    the same size over ``num_encoders``."""
    if num_encoders == 1:
        return counts
    images = counts[:, COUNTS.index("num_images")]
    share = np.ceil(images / num_encoders) / np.maximum(images, 1)
    found = counts / num_ranks
    for name in _OF_IMAGES:
        found[:, COUNTS.index(name)] = counts[:, COUNTS.index(name)] * share
    return found


def evenly_divided(counts: np.ndarray, num_ranks: int, num_encoders: int) -> np.ndarray:
    """The mean share of each microbatch: at most what ``divided`` gives."""
    is_of_images = np.isin(COUNTS, _OF_IMAGES)
    return counts / np.where(is_of_images, num_encoders, num_ranks)
