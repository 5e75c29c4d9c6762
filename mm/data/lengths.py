"""The lengths of all samples of a dataset, known before any is decoded: input of packing, samplers and reports."""

from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np


class HasLengths(Protocol):
    """Gives the lengths of the samples of a dataset, possibly without keeping all of them in memory."""

    def __len__(self) -> int: ...

    def of(self, numbers: np.ndarray) -> "Lengths":
        """The lengths of these samples, in the given order, loaded into memory."""
        ...


@dataclass(frozen=True)
class Lengths:
    """One entry per sample, in dataset order, after truncation to ``--seq-length``."""

    num_tokens: np.ndarray
    """int32 [num_samples], including visual tokens."""
    num_target_tokens: np.ndarray
    """int32"""
    num_media: np.ndarray
    """int32: images and videos."""
    num_patches: np.ndarray
    """int32: total over all images and videos."""
    num_image_pairs: np.ndarray
    """int64: pairs of patches in full-attention layers of the ViT, counted by ``mm.batch.image_pairs``."""
    num_window_pairs: np.ndarray
    """int64: the same in window-attention layers, counted by ``mm.batch.window_pairs``."""

    def __len__(self) -> int:
        return len(self.num_tokens)

    def of(self, numbers: np.ndarray) -> "Lengths":
        """See ``HasLengths``."""
        return Lengths(*(getattr(self, one.name)[numbers] for one in fields(self)))
