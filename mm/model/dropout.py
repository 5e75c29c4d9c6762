"""Dropout that is a function of what is dropped: of the step, the sample, the place in it, the layer and the column.

So no layout changes it, a recomputed layer draws the same again, and nothing is kept for the backward pass.  Every
place of a matrix is hashed to 32 bits; those below a threshold are dropped.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mm.batch import Microbatch

_BITS = 0xFFFFFFFF
_PLACES_AT_A_TIME = 1 << 22
"""Numbers of a matrix; their int64 hashes take 32 MiB at each step on the way."""


def mixed(numbers: Tensor) -> Tensor:
    """A hash of int64 numbers of 0 to 2^32 - 1, into the same range.

    The rounds of "[16 21f0aaad 15 735a2d97 15]" of https://github.com/skeeto/hash-prospector, whose factors are below
    2^31: no product leaves int64, on any device.
    """
    numbers = (numbers ^ (numbers >> 16)) * 0x21F0AAAD & _BITS
    numbers = (numbers ^ (numbers >> 15)) * 0x735A2D97 & _BITS
    return numbers ^ (numbers >> 15)


def seed_of(*words: object) -> int:
    """A number of 32 bits for a step, or for a layer."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, words)).encode()).digest()[:4], "little")


@dataclass(frozen=True)
class RowKeys:
    """A number for each row that a linear layer works on, int64 on the device; None: nothing is dropped."""

    piece: Tensor | None = None
    """Of the rows that come to a layer whose outputs are cut: under sequence parallelism a piece."""
    whole: Tensor | None = None
    """Of the rows that come to a layer whose inputs are cut: all, as the pieces lie."""
    ordered: Tensor | None = None
    """The same in the order in which attention has them."""


NO_KEYS = RowKeys()


def token_keys(microbatch: Microbatch, seed: int) -> Tensor:
    """int64 [num_tokens], on the host: a key for each token, which the place in its sample decides."""
    lengths = torch.tensor(microbatch.segment_lengths, dtype=torch.int64)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    positions = torch.arange(microbatch.num_tokens) - starts
    return mixed(_sample_keys(microbatch, seed).repeat_interleave(lengths) ^ mixed(positions))


def patch_keys(microbatch: Microbatch, images: tuple[int, ...], visual_token_ids: tuple[int, int], seed: int) -> Tensor:
    """int64 [patches of ``images``], on the host: a key for each patch in reading order, which sample, number of the
    image in it and place in the image decide."""
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
    return mixed(mixed(torch.tensor(microbatch.samples, dtype=torch.int64) & _BITS) ^ (seed & _BITS))


@dataclass(frozen=True, eq=False)
class Dropout:
    """One layer's choice among the numbers of a matrix, the same whenever it is asked."""

    probability: float
    rows: Tensor
    """int64 [rows]: keys."""
    salt: int
    """Of the layer."""
    first_column: int = 0
    """Which column of the whole matrix the first one here is."""

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [rows, columns] without what is dropped, the rest scaled up so that its mean stays."""
        columns = torch.arange(self.first_column, self.first_column + x.shape[1], device=x.device)
        column_keys, threshold = mixed(mixed(columns) ^ self.salt), int(self.probability * 2**32)
        result, step = torch.empty_like(x), max(1, _PLACES_AT_A_TIME // max(1, x.shape[1]))
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            is_kept = mixed(self.rows[rows, None] ^ column_keys) >= threshold
            torch.mul(x[rows], is_kept, out=result[rows])
        return result.mul_(1.0 / (1.0 - self.probability))
