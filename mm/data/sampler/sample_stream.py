"""The endless stream of samples, and the part of it that each data-parallel rank takes.

The stream depends on the number of samples, the seed and, for some samplers, the costs of samples; never on the layout.
So a run can continue from its count of consumed samples under another layout.

Which samples of a dataset are used: rates, and the share set aside for validation.

Pure functions of counts and the seed, so every rank and every start gets the same result.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

StepSamples = list[list[int]]
"""The sample numbers in each microbatch of one rank."""
Deal = Callable[[np.ndarray], list[StepSamples]]
"""Maps the samples of a global batch to what each rank takes; each sample once.  The same on every rank."""


class Stream:
    """Endless epochs; each contains every sample once.

    Keeps the order of one epoch in memory: 0.4 GB for 100 million samples.
    """

    def __init__(self, num_samples: int, of_epoch: Callable[[int], np.ndarray] | None) -> None:
        """``of_epoch`` gives the order of samples in an epoch, as a pure function of the epoch's number; None: the
        samples in ascending order."""
        self._num_samples, self._of_epoch = num_samples, of_epoch
        self._epoch, self._order = -1, np.empty(0, dtype=np.uint32)

    def samples(self, first: int, count: int) -> np.ndarray:
        """int64 [count]: the samples at ``count`` positions, starting at ``first``."""
        pieces, last = [np.empty(0, dtype=np.int64)], first + count
        while first < last:
            epoch, place = divmod(first, self._num_samples)
            end = min(self._num_samples, place + last - first)
            pieces.append(self._piece(epoch, place, end))
            first += end - place
        return np.concatenate(pieces)

    def _piece(self, epoch: int, place: int, end: int) -> np.ndarray:
        """A copy, so that the order of one epoch is freed before the next is computed."""
        if self._of_epoch is None:
            return np.arange(place, end)
        if epoch != self._epoch:
            self._order = np.empty(0, dtype=np.uint32)
            self._order, self._epoch = self._of_epoch(epoch), epoch
        return self._order[place:end].astype(np.int64)


def shuffled(num_samples: int, seed: int, shuffle: bool = True) -> Stream:
    """Each epoch in a new random order, or in file order without ``shuffle``."""
    return Stream(num_samples, partial(_shuffled_epoch, num_samples, seed) if shuffle else None)


def _shuffled_epoch(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    return permutation(generator(seed, epoch), num_samples)


def permutation(random: np.random.Generator, count: int) -> np.ndarray:
    """numpy's ``random.permutation(count)`` in half the memory: the random draws do not depend on the dtype."""
    numbers = np.arange(count, dtype=np.uint32 if count < 2**32 else np.int64)
    random.shuffle(numbers)
    return numbers


def generator(seed: int, epoch: int) -> np.random.Generator:
    """The random generator of an epoch."""
    # SeedSequence mixes the two, so that (seed 1, epoch 0) and (seed 0, epoch 1) are unrelated.
    return np.random.default_rng(np.random.SeedSequence([seed, epoch]))


def in_turn(samples: np.ndarray, micro_batch_size: int, dp_size: int) -> list[StepSamples]:
    """Microbatch m of rank d takes ``micro_batch_size`` samples from ``(m * dp_size + d) * micro_batch_size`` on."""
    of_all = samples.reshape(-1, dp_size, micro_batch_size)
    return [of_all[:, rank].tolist() for rank in range(dp_size)]


@dataclass(frozen=True)
class SampleOrder:
    """The samples of one data-parallel rank in every step."""

    stream: Stream
    deal: Deal
    global_batch_size: int
    """Samples per step, over all ranks."""
    dp_rank: int
    consumed_samples: int = 0
    """Samples already trained on, over all ranks: where the stream continues."""

    def of_ranks(self, number: int) -> list[StepSamples]:
        """What each rank takes, ``number`` optimizer steps after ``consumed_samples``."""
        first = self.consumed_samples + number * self.global_batch_size
        return self.deal(self.stream.samples(first, self.global_batch_size))

    def step(self, number: int) -> StepSamples:
        """The same for this rank."""
        return self.of_ranks(number)[self.dp_rank]

    def steps(self) -> Iterator[StepSamples]:
        """All steps of this rank after ``consumed_samples``, endless."""
        number = 0
        while True:
            yield self.step(number)
            number += 1


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
