"""Which sample stands where in the endless stream of samples, and which part of it a data-parallel rank takes.

The stream depends on the number of samples and the seed only, never on the layout, so
a run may go on from its count of consumed samples under another one.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Order:
    """The samples of every microbatch of one data-parallel rank."""

    num_samples: int
    seed: int
    shuffle: bool
    global_batch_size: int
    """A multiple of ``micro_batch_size`` x ``dp_size``."""
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    consumed_samples: int = 0
    """How many samples all ranks together have trained on before: where the stream goes on."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of this rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def indices(self, step: int, microbatch: int) -> list[int]:
        """Samples of one microbatch, ``step`` optimizer steps after ``consumed_samples``.

        Microbatch m of rank d takes ``micro_batch_size`` positions of the stream from number
        ``(m * dp_size + d) * micro_batch_size`` of the global batch.  So all ranks together take each of its positions
        once, whatever ``dp_size`` is.
        """
        first = self.consumed_samples + step * self.global_batch_size
        first += (microbatch * self.dp_size + self.dp_rank) * self.micro_batch_size
        return [self.sample_at(position) for position in range(first, first + self.micro_batch_size)]

    def sample_at(self, position: int) -> int:
        """Index of the sample at ``position`` of the stream.

        The stream is epoch after epoch; each epoch holds each sample once, in a new order unless ``shuffle`` is off.
        """
        epoch, place = divmod(position, self.num_samples)
        return int(_permutation(self.num_samples, self.seed, epoch)[place]) if self.shuffle else place


@lru_cache(maxsize=2)  # a global batch may span two epochs
def _permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    # SeedSequence mixes the pair, so that (seed 1, epoch 0) and (seed 0, epoch 1) have nothing in common.
    return np.random.default_rng(np.random.SeedSequence([seed, epoch])).permutation(num_samples)
