"""Which sample stands where in the endless stream of samples, and which part of it a data-parallel rank takes.

The stream depends on the number of samples, the seed and, in some samplers, what samples cost; never on the layout.
So a run may go on from its count of consumed samples under another one.  Which sampler the user has named, and what a
sample costs, is not known here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

Step = list[list[int]]
"""Numbers of the samples in each microbatch of one rank."""
Deal = Callable[[np.ndarray], list[Step]]
"""From the samples of a global batch to what each rank takes: each sample once.  The same on every rank."""


class Stream:
    """Epoch after epoch without end; each holds each sample once.

    Holds the order of one epoch at a time: that of 100 million samples takes 0.4 GB.
    """

    def __init__(self, num_samples: int, of_epoch: Callable[[int], np.ndarray] | None) -> None:
        """``of_epoch`` gives the samples of an epoch in their order, as a pure function of its number; None: in that of
        their numbers."""
        self._num_samples, self._of_epoch = num_samples, of_epoch
        self._epoch, self._order = -1, np.empty(0, dtype=np.uint32)

    def samples(self, first: int, count: int) -> np.ndarray:
        """int64 [count]: the samples at ``count`` positions from ``first`` on."""
        parts, last = [np.empty(0, dtype=np.int64)], first + count
        while first < last:
            epoch, place = divmod(first, self._num_samples)
            end = min(self._num_samples, place + last - first)
            parts.append(self._part(epoch, place, end))
            first += end - place
        return np.concatenate(parts)

    def _part(self, epoch: int, place: int, end: int) -> np.ndarray:
        """A copy, so that the order of an epoch is freed before that of the next is made."""
        if self._of_epoch is None:
            return np.arange(place, end)
        if epoch != self._epoch:
            self._order = np.empty(0, dtype=np.uint32)
            self._order, self._epoch = self._of_epoch(epoch), epoch
        return self._order[place:end].astype(np.int64)


def shuffled(num_samples: int, seed: int, shuffle: bool = True) -> Stream:
    """Each epoch in a new order, or, without ``shuffle``, in that of the files."""
    return Stream(num_samples, partial(_shuffled_epoch, num_samples, seed) if shuffle else None)


def _shuffled_epoch(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    return permutation(generator(seed, epoch), num_samples)


def permutation(random: np.random.Generator, count: int) -> np.ndarray:
    """numpy's ``random.permutation(count)``, in half the memory: what it draws does not depend on the dtype."""
    numbers = np.arange(count, dtype=np.uint32 if count < 2**32 else np.int64)
    random.shuffle(numbers)
    return numbers


def generator(seed: int, epoch: int) -> np.random.Generator:
    """Random numbers of an epoch."""
    # SeedSequence mixes the pair, so that (seed 1, epoch 0) and (seed 0, epoch 1) have nothing in common.
    return np.random.default_rng(np.random.SeedSequence([seed, epoch]))


def in_turn(samples: np.ndarray, micro_batch_size: int, dp_size: int) -> list[Step]:
    """Microbatch m of rank d takes ``micro_batch_size`` samples from ``(m * dp_size + d) * micro_batch_size`` on."""
    of_all = samples.reshape(-1, dp_size, micro_batch_size)
    return [of_all[:, rank].tolist() for rank in range(dp_size)]


@dataclass(frozen=True)
class Order:
    """The samples of every step of one data-parallel rank."""

    stream: Stream
    deal: Deal
    global_batch_size: int
    """Samples that all ranks together take in a step."""
    dp_rank: int
    consumed_samples: int = 0
    """How many samples all ranks together have trained on before: where the stream goes on."""

    @classmethod
    def plain(
        cls, num_samples: int, seed: int, shuffle: bool, global_batch_size: int, micro_batch_size: int, dp_rank: int,
        dp_size: int, consumed_samples: int = 0,
    ) -> "Order":
        """Microbatches of ``micro_batch_size`` samples, dealt in turn; ``global_batch_size`` is a number of turns."""
        deal = partial(in_turn, micro_batch_size=micro_batch_size, dp_size=dp_size)
        return cls(shuffled(num_samples, seed, shuffle), deal, global_batch_size, dp_rank, consumed_samples)

    def of_ranks(self, number: int) -> list[Step]:
        """What each rank takes, ``number`` optimizer steps after ``consumed_samples``."""
        first = self.consumed_samples + number * self.global_batch_size
        return self.deal(self.stream.samples(first, self.global_batch_size))

    def step(self, number: int) -> Step:
        """What this rank takes."""
        return self.of_ranks(number)[self.dp_rank]

    def steps(self) -> Iterator[Step]:
        """Of all steps from ``consumed_samples`` on, without end."""
        number = 0
        while True:
            yield self.step(number)
            number += 1
