"""Dropout as a hash of what is dropped: the step, the sample, the position in it, the layer and the column.

So no layout changes it, a recomputed layer drops the same elements, and no mask is kept for the backward pass.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mm.batch import Microbatch
from mm.device.pointwise import BITS, mixed

_PLACES_AT_A_TIME = 1 << 22
"""Elements of a matrix hashed at once; each int64 intermediate takes 32 MiB."""


def seed_of(*words: object) -> int:
    """A 32-bit seed for a step or a layer."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, words)).encode()).digest()[:4], "little")


@dataclass(frozen=True)
class RowKeys:
    """A key for each row of a linear layer's input, int64 on the device; None: nothing is dropped.

    With sequence parallelism, rows 0 to 3, TP 2 and attention order 2 0 3 1, rank 0 has ``piece`` 0 1, ``whole``
    0 1 2 3 and ``ordered`` 2 0 3 1.
    """

    piece: Tensor | None = None
    """Keys of this rank's piece of the rows, for column-parallel layers; of all rows without sequence parallelism."""
    whole: Tensor | None = None
    """Keys of all rows in sequence-parallel order, for row-parallel layers."""
    ordered: Tensor | None = None
    """Keys of all rows in attention's order, for the projection that follows attention."""


NO_KEYS = RowKeys()


def token_keys(microbatch: Microbatch, seed: int) -> Tensor:
    """int64 [num_tokens], on the host: a key for each token, from its sample and its position there."""
    lengths = torch.tensor(microbatch.segment_lengths, dtype=torch.int64)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    positions = torch.arange(microbatch.num_tokens) - starts
    return mixed(_sample_keys(microbatch, seed).repeat_interleave(lengths) ^ mixed(positions))


def patch_keys(microbatch: Microbatch, images: tuple[int, ...], visual_token_ids: tuple[int, int], seed: int) -> Tensor:
    """int64 [patches of ``images``], on the host: a key for each patch in reading order, from its sample, the image's
    number in the sample and the position in the image."""
    counts = torch.tensor([math.prod(grid) for grid in microbatch.image_grids], dtype=torch.int64)
    places = torch.isin(microbatch.token_ids, torch.tensor(visual_token_ids)).nonzero().squeeze(1)
    per_token = int(counts.sum()) // len(places)
    ends = torch.tensor(microbatch.segment_lengths, dtype=torch.int64).cumsum(0)
    samples = torch.searchsorted(ends, places[(counts.cumsum(0) - counts) // per_token], right=True)
    numbers = torch.arange(len(samples)) - torch.searchsorted(samples, samples)  # of the image in its sample
    image_keys = mixed(_sample_keys(microbatch, seed + 1)[samples] ^ mixed(numbers))
    keys = [mixed(image_keys[image] ^ mixed(torch.arange(int(counts[image])))) for image in images]
    return torch.cat(keys) if keys else torch.empty(0, dtype=torch.int64)


def _sample_keys(microbatch: Microbatch, seed: int) -> Tensor:
    assert len(microbatch.samples) == len(microbatch.segment_lengths), "dropout needs to know which samples these are"
    return mixed(mixed(torch.tensor(microbatch.samples, dtype=torch.int64) & BITS) ^ (seed & BITS))


@dataclass(frozen=True, eq=False)
class Dropout:
    """One layer's dropout of a matrix; the same elements at every call."""

    probability: float
    rows: Tensor
    """int64 [rows]: keys of the rows."""
    salt: int
    """Seed of the layer."""
    first_column: int = 0
    """Index in the whole matrix of this rank's first column."""

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [rows, columns] with dropped elements zeroed and the rest scaled up, which preserves the mean."""
        columns = torch.arange(self.first_column, self.first_column + x.shape[1], device=x.device)
        column_keys, threshold = mixed(mixed(columns) ^ self.salt), int(self.probability * 2**32)
        result, step = torch.empty_like(x), max(1, _PLACES_AT_A_TIME // max(1, x.shape[1]))
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            is_kept = mixed(self.rows[rows, None] ^ column_keys) >= threshold
            torch.mul(x[rows], is_kept, out=result[rows])
        return result.mul_(1.0 / (1.0 - self.probability))
