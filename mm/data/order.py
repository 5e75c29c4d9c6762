"""Which sample stands where in the endless stream of samples, and which part of it a data-parallel rank takes.

Pure: no files, no processes.  The stream depends on the number of samples and the seed only, never on the layout, so
a run may go on from its count of consumed samples under another one.
"""

from functools import lru_cache

import numpy as np


def sample_index(position: int, num_samples: int, seed: int, shuffle: bool) -> int:
    """Index of the sample at ``position`` of the stream.

    The stream is epoch after epoch; each epoch holds each sample once, in an order of its own unless ``shuffle`` is
    off.
    """
    epoch, place = divmod(position, num_samples)
    return int(_permutation(num_samples, seed, epoch)[place]) if shuffle else place


@lru_cache(maxsize=2)  # a global batch may span two epochs
def _permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    # SeedSequence mixes the pair, so that (seed 1, epoch 0) and (seed 0, epoch 1) have nothing in common.
    return np.random.default_rng(np.random.SeedSequence([seed, epoch])).permutation(num_samples)


def microbatch_positions(
    first_position: int, microbatch: int, dp_rank: int, dp_size: int, micro_batch_size: int
) -> range:
    """Stream positions of one rank's ``microbatch`` in the global batch that begins at ``first_position``.

    Microbatch m of rank d takes ``micro_batch_size`` positions from number ``(m * dp_size + d) * micro_batch_size``
    of the global batch.  So all ranks together take each of its positions once, whatever ``dp_size`` is.
    """
    start = first_position + (microbatch * dp_size + dp_rank) * micro_batch_size
    return range(start, start + micro_batch_size)


def microbatch_indices(
    step: int,
    microbatch: int,
    *,
    num_samples: int,
    seed: int,
    shuffle: bool,
    global_batch_size: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    consumed_samples: int = 0,
) -> list[int]:
    """Samples of ``microbatch`` of one data-parallel rank, ``step`` optimizer steps after ``consumed_samples``."""
    first_position = consumed_samples + step * global_batch_size
    positions = microbatch_positions(first_position, microbatch, dp_rank, dp_size, micro_batch_size)
    return [sample_index(position, num_samples, seed, shuffle) for position in positions]
