"""What each sample of a dataset holds, known before any is decoded: the ground for packing, samplers and reports.

Where the numbers come from is not known here.
"""

from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np


class HasLengths(Protocol):
    """Knows what each sample of a dataset holds, perhaps without holding all of it in memory."""

    def __len__(self) -> int: ...

    def of(self, numbers: np.ndarray) -> "Lengths":
        """The lengths of some samples, in the given order; in memory."""
        ...


@dataclass(frozen=True)
class Lengths:
    """One number a sample, in the order of the dataset: of the sample as it is trained on, cut at ``--seq-length``."""

    num_tokens: np.ndarray
    """int32 [num_samples], visual tokens among them."""
    num_target_tokens: np.ndarray
    """int32"""
    num_media: np.ndarray
    """int32: pictures and videos."""
    num_patches: np.ndarray
    """int32: of all pictures and videos together."""
    num_image_pairs: np.ndarray
    """int64: pairs of patches in full-attention layers of the ViT, as ``mm.batch.image_pairs`` counts them."""
    num_window_pairs: np.ndarray
    """int64: in layers with windows, as ``mm.batch.window_pairs``."""

    def __len__(self) -> int:
        return len(self.num_tokens)

    def of(self, numbers: np.ndarray) -> "Lengths":
        """As ``HasLengths`` says."""
        return Lengths(*(getattr(self, one.name)[numbers] for one in fields(self)))
