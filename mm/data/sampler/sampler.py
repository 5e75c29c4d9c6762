"""Which samples are used, in which order, and which data-parallel rank trains on which in each step.

Everything is a pure function of counts, costs and the seed, so every rank and every start gets the same result.  The
stream of samples never depends on the layout, so a run continues from its count of consumed samples under another one.
The samplers differ in the distribution of a global batch over the ranks, and BucketBatchSampler in the stream: as in
MindSpeed-MM, ranks compute similar amounts at the same time, but cost covers the whole sample and not only its images,
nothing is dropped, and the seed has an effect.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from mm.config.data import DataConfig
from mm.config.run import Run
from mm.data.sample import HasLengths
from mm.data.sampler.balance import (
    Budget,
    Groups,
    Sizes,
    dealt,
    even_groups,
    even_packs,
    fullest_packs,
    spread,
)
from mm.data.sampler.cost import SampleSizes

StepSamples = list[list[int]]
"""The sample numbers in each microbatch of one rank."""
HasSizes = SampleSizes | Sizes
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
    def of_epoch(epoch: int) -> np.ndarray:
        return permutation(generator(seed, epoch), num_samples)

    return Stream(num_samples, of_epoch if shuffle else None)


def permutation(random: np.random.Generator, count: int) -> np.ndarray:
    """numpy's ``random.permutation(count)`` in half the memory: the random draws do not depend on the dtype."""
    numbers = np.arange(count, dtype=np.uint32 if count < 2**32 else np.int64)
    random.shuffle(numbers)
    return numbers


def generator(seed: int, epoch: int) -> np.random.Generator:
    """The random generator of an epoch; SeedSequence mixes the two numbers."""
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


NUM_BUCKETS = 16
"""Buckets have the same number of samples.  MindSpeed-MM has 7, by patches, for images of 262,144 pixels."""
BLOCK_SAMPLES = 64
"""Consecutive samples of one bucket in the stream.  MindSpeed-MM uses one microbatch of all ranks, which makes the
stream depend on the layout.  64 corresponds to 8 nodes of 8 devices with one sample each."""


def bucket_stream(costs: np.ndarray, seed: int, shuffle: bool) -> Stream:
    """``data_bucketing_img``: blocks of samples from one bucket, in random order.

    What remains of each bucket after its last full block is mixed together.
    """
    num_samples = len(costs)
    num_buckets = max(1, min(NUM_BUCKETS, num_samples // BLOCK_SAMPLES))
    by_cost = np.argsort(costs, kind="stable").astype(np.uint32 if num_samples < 2**32 else np.int64)
    buckets = np.array_split(by_cost, num_buckets)

    def of_epoch(epoch: int) -> np.ndarray:
        random = generator(seed, epoch)
        rows = [random.permutation(bucket) if shuffle else bucket for bucket in buckets]
        whole = [row[: len(row) // BLOCK_SAMPLES * BLOCK_SAMPLES] for row in rows]
        left = np.concatenate([row[len(full) :] for row, full in zip(rows, whole, strict=True)])
        left = random.permutation(left) if shuffle else left
        samples = np.concatenate([*whole, left])
        if not shuffle:
            return samples
        num_whole = num_samples // BLOCK_SAMPLES
        whole_samples, rest = samples[: num_whole * BLOCK_SAMPLES], samples[num_whole * BLOCK_SAMPLES :]
        order = random.permutation(num_whole + bool(len(rest)))
        blocks = whole_samples.reshape(num_whole, BLOCK_SAMPLES)
        if not len(rest):
            return blocks[order].reshape(-1)
        place = int(np.flatnonzero(order == num_whole)[0])  # position of the shorter block
        return np.concatenate([blocks[order[:place]].reshape(-1), rest, blocks[order[place + 1 :]].reshape(-1)])

    return Stream(num_samples, of_epoch)


PACKS_OF_STAGE = 4
"""Packs of even cost that each rank gets per pipeline stage, if there are enough samples.  With four, a pipeline idles
for at most a fifth of its time; twice as many would save up to another tenth, but halve the tokens in each."""


@dataclass(frozen=True)
class BatchShares:
    """How a global batch is divided."""

    dp_size: int
    """Number of data-parallel ranks."""
    budget: Budget
    """Limits of one pack."""
    micro_batch_size: int = 1
    """Samples per microbatch without packing."""
    unit: int = 1
    """The number of packs per rank is a multiple of this."""
    num_stages: int = 1
    """Number of pipeline stages."""


@dataclass(frozen=True)
class Sampler:
    """Orders all samples, and distributes those of a global batch over the ranks."""

    deal: Callable[[np.ndarray, HasSizes, BatchShares], list[StepSamples]]
    has_buckets: bool = False
    """Whether samples of similar cost follow one another; otherwise they are shuffled, or in file order."""

    def order(self, sizes: HasSizes, shares: BatchShares, seed: int, shuffle: bool = True) -> tuple[Stream, Deal]:
        """The stream of all samples, and the function that distributes a global batch of it."""
        stream = bucket_stream(sizes.all_costs(), seed, shuffle) if self.has_buckets else (
            shuffled(len(sizes), seed, shuffle))
        return stream, lambda samples: self.deal(samples, sizes, shares)


def sampler_name(data: DataConfig) -> str:
    """The key in ``SAMPLERS`` for a data JSON.  All samplers that ignore costs share one key."""
    by_cost = {"BucketBatchSampler": f"BucketBatchSampler, {data.priority_mode}",
               "BalancedBatchSampler": "BalancedBatchSampler"}
    return by_cost.get(data.sampler_type, PLAIN) + PACKING * data.packs


def order_description(run: Run) -> str:
    """The order of the samples as far as settings determine it.  Checkpoints store and compare this text."""
    how = f"shuffled by --seed {run.args.seed}" if run.data.is_shuffled else "in the order of the files"
    return f"in buckets of like cost, {how}" if SAMPLERS[sampler_name(run.data)].has_buckets else how


def order_of(
    run: Run, lengths: HasLengths, dp_rank: int, consumed_samples: int, sizes: SampleSizes | None = None
) -> SampleOrder:
    """What replica ``dp_rank`` trains on; ``sizes``, if given, are those of ``lengths``."""
    data, args = run.data, run.args
    shares = BatchShares(run.dp_size, budget_of(run), args.micro_batch_size, run.microbatch_unit, run.num_stages)
    sizes = sizes or SampleSizes(run.model, lengths)
    stream, deal = SAMPLERS[sampler_name(data)].order(sizes, shares, args.seed, data.is_shuffled)
    return SampleOrder(stream, deal, run.global_batch_size, dp_rank, consumed_samples)


def budget_of(run: Run) -> Budget:
    return Budget(run.args.seq_length * run.args.micro_batch_size, run.data.packing_max_patches)


def plain(samples: np.ndarray, sizes: HasSizes, shares: BatchShares) -> list[StepSamples]:
    """Deal in turn, regardless of cost."""
    return in_turn(samples, shares.micro_batch_size, shares.dp_size)


def reordered(samples: np.ndarray, sizes: HasSizes, shares: BatchShares) -> list[StepSamples]:
    """``data_reordering_img``: deal the samples of a global batch by ascending cost, so costly microbatches coincide.

    Every second round runs backwards through the ranks; otherwise the last rank would always get the costliest.
    """
    ordered = samples[np.argsort(sizes.of(samples).costs, kind="stable")]
    rounds = ordered.reshape(-1, shares.dp_size, shares.micro_batch_size)
    rounds[1::2] = rounds[1::2, ::-1].copy()
    return plain(rounds.reshape(-1), sizes, shares)


def packed(samples: np.ndarray, sizes: HasSizes, shares: BatchShares) -> list[StepSamples]:
    """The fewest, fullest packs; tokens are distributed roughly evenly over the ranks."""
    own, dp_size, unit = sizes.of(samples), shares.dp_size, shares.unit
    packs = fullest_packs(own.num_tokens, own.num_patches, shares.budget)
    if len(packs) < dp_size or (unit > 1 and len(packs) % (dp_size * unit)):
        packs = even_packs(Sizes(own.num_tokens, own.num_tokens, own.num_patches), shares.budget, dp_size, unit)
    ranks = _dealt(_sums(own.num_tokens, packs), shares)
    return _steps(samples, [[packs[number] for number in rank] for rank in ranks])


def packed_evenly(samples: np.ndarray, sizes: HasSizes, shares: BatchShares) -> list[StepSamples]:
    """Packs of even cost; all ranks cost the same.

    As few packs per rank as the budget allows, but enough for the stages of the pipeline: a half-full pack costs half,
    while a pipeline without enough microbatches idles.
    """
    own, wanted = sizes.of(samples), PACKS_OF_STAGE * shares.num_stages if shares.num_stages > 1 else 1
    packs = even_packs(own, shares.budget, shares.dp_size, shares.unit, wanted)
    return _steps(samples, spread(packs, _dealt(_sums(own.costs, packs), shares), own, shares.budget))


def _dealt(costs: np.ndarray, shares: BatchShares) -> Groups:
    """With a unit, each rank gets the same number of packs; otherwise only cost counts, with at least one pack each."""
    of_each = len(costs) // shares.dp_size
    return dealt(costs, shares.dp_size, *((of_each, of_each) if shares.unit > 1 else (1,)))


def balanced(samples: np.ndarray, sizes: HasSizes, shares: BatchShares) -> list[StepSamples]:
    """Microbatches of even cost, the same number for each rank; total cost is even over the ranks."""
    own, nothing = sizes.of(samples).costs, np.zeros_like(samples)
    groups = even_groups(own, shares.micro_batch_size)
    of_each = len(groups) // shares.dp_size
    ranks = dealt(_sums(own, groups), shares.dp_size, of_each, of_each)
    return _steps(samples, spread(groups, ranks, Sizes(own, nothing, nothing), Budget(num_tokens=0)))


def _sums(values: np.ndarray, groups: Groups) -> np.ndarray:
    sizes = np.array([len(group) for group in groups])
    return np.add.reduceat(values[[one for group in groups for one in group]], np.cumsum(sizes) - sizes)


def _steps(samples: np.ndarray, ranks: list[Groups]) -> list[StepSamples]:
    numbers = samples.tolist()
    return [[[numbers[one] for one in group] for group in groups] for groups in ranks]


PLAIN, PACKING = "BaseRandomBatchSampler", " with packing"
SAMPLERS: Mapping[str, Sampler] = {
    PLAIN: Sampler(plain),
    "BucketBatchSampler, data_bucketing_img": Sampler(plain, has_buckets=True),
    "BucketBatchSampler, data_reordering_img": Sampler(reordered),
    PLAIN + PACKING: Sampler(packed),
    "BalancedBatchSampler": Sampler(balanced),
    "BalancedBatchSampler" + PACKING: Sampler(packed_evenly),
}
"""Keyed by ``sampler_name``.  mm/config refuses bucket samplers with packing."""
