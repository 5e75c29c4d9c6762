"""Which samples of a dataset are used: rates, and the share set aside for validation.

Pure functions of counts and the seed, so every rank and every start gets the same result.
"""

import zlib

import numpy as np

from mm.data.sampler.sample_stream import permutation

_BATCH_SAMPLES = 1 << 20


def chosen(num_samples: int, rate_percent: float, wanted: int | None, seed: int, content: str) -> np.ndarray:
    """The numbers of the samples that are used of the file with the checksum ``content``.

    ``wanted`` replaces the dataset's size, and ``rate_percent`` percent of it are used.  Each full 100% takes every
    sample once; the rest is drawn without replacement, in dataset order.
    """
    whole, rest = divmod(num_chosen(num_samples, rate_percent, wanted), max(num_samples, 1))
    drawn = permutation(_random(seed, content), num_samples)[:rest]
    return np.concatenate([np.tile(np.arange(num_samples, dtype=drawn.dtype), whole), np.sort(drawn)])


def num_chosen(num_samples: int, rate_percent: float, wanted: int | None) -> int:
    """How many samples ``chosen`` takes."""
    return round((num_samples if wanted is None else wanted) * rate_percent / 100) if num_samples else 0


def split_off(samples: np.ndarray, rate: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split ``samples`` into training and validation.  ``rate`` of the distinct samples go to validation, each once.

    A sample that occurs several times is entirely on one side.
    """
    is_trained = np.zeros(int(samples.max(initial=0)) + 1, dtype=bool)
    for some in _batches(samples):
        is_trained[some] = True
    different = np.concatenate([np.flatnonzero(some).astype(samples.dtype) + samples.dtype.type(number * _BATCH_SAMPLES)
                                for number, some in enumerate(_batches(is_trained))])
    num_kept = round(len(different) * rate)
    _random(seed, "validation").shuffle(different)  # same draws as ``permutation``, without a copy
    kept = np.sort(different[:num_kept])
    del different
    is_trained[kept] = False
    return np.concatenate([some[is_trained[some]] for some in _batches(samples)]), kept


def _batches(values: np.ndarray) -> list[np.ndarray]:
    """Views, so that only some indices at a time are widened to 64 bits."""
    return [values[first : first + _BATCH_SAMPLES] for first in range(0, max(len(values), 1), _BATCH_SAMPLES)]


def _random(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
