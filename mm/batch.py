"""What the data side hands to the model side: one packed microbatch.

Knows nothing of files, tokenizers or parallelism.
"""

from dataclasses import dataclass

from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that has no loss (torch's and transformers' convention)."""

Grid = tuple[int, int, int]
"""Patches of one image along time, height and width."""


@dataclass(frozen=True)
class Microbatch:
    """Samples packed one after another as segments; nothing is padded.

    All tensors are on the CPU.  ``image_grids`` stand in the order in which the images appear in ``token_ids``.
    """

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
    pixel_values: Tensor | None
    """float32 [num_patches, channels x frames x height x width]; None without images, and on every rank that does
    not hold the patch embedding."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def num_patches(self) -> int:
        return sum(t * h * w for t, h, w in self.image_grids)

    @property
    def num_target_tokens(self) -> int:
        return int((self.labels != IGNORE_INDEX).sum())

    def without_pixels(self) -> "Microbatch":
        """The light part: what every rank of a model replica needs."""
        return Microbatch(self.token_ids, self.labels, self.positions, self.segment_lengths, self.image_grids, None)


