"""Which samples of a dataset are taken: rates, and the share that is kept for validation.

Pure functions of counts and the seed, so every rank and every start finds the same.
"""

import zlib

import numpy as np

from mm.data.order.stream import permutation

_CHUNK = 1 << 20


def chosen(num_samples: int, rate_percent: float, wanted: int | None, seed: int, name: str) -> np.ndarray:
    """Numbers of the samples of the dataset ``name`` that are taken.

    ``wanted`` samples in place of all, and of these ``rate_percent`` percent.  Whole hundreds take every sample once
    each; what is left over is drawn without repeating, and stands in the dataset's order.
    """
    whole, rest = divmod(num_chosen(num_samples, rate_percent, wanted), max(num_samples, 1))
    drawn = permutation(_random(seed, name), num_samples)[:rest]
    return np.concatenate([np.tile(np.arange(num_samples, dtype=drawn.dtype), whole), np.sort(drawn)])


def num_chosen(num_samples: int, rate_percent: float, wanted: int | None) -> int:
    """How many ``chosen`` takes."""
    return round((num_samples if wanted is None else wanted) * rate_percent / 100) if num_samples else 0


def split(samples: np.ndarray, rate: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """``samples`` for training and for validation; ``rate`` of the different ones are for the latter, each once.

    A sample that is taken several times is wholly on one side.
    """
    is_trained = np.zeros(int(samples.max(initial=0)) + 1, dtype=bool)
    for some in _chunks(samples):
        is_trained[some] = True
    different = np.concatenate([np.flatnonzero(some).astype(samples.dtype) + samples.dtype.type(number * _CHUNK)
                                for number, some in enumerate(_chunks(is_trained))])
    num_kept = round(len(different) * rate)
    _random(seed, "validation").shuffle(different)  # draws what ``permutation`` draws, without a copy
    kept = np.sort(different[:num_kept])
    del different
    is_trained[kept] = False
    return np.concatenate([some[is_trained[some]] for some in _chunks(samples)]), kept


def _chunks(values: np.ndarray) -> list[np.ndarray]:
    """Views, so that indices are widened to 64 bits for some values at a time."""
    return [values[first : first + _CHUNK] for first in range(0, max(len(values), 1), _CHUNK)]


def _random(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
