"""The order of samples that the settings of a run ask for: which sampler, and whether microbatches are packs.

The global batch of a step holds the same samples under every layout, and with BalancedBatchSampler and packs the same
as with a plain shuffle: only who takes which of them differs.
"""

from functools import partial

import numpy as np

from mm.config.data import DataConfig
from mm.config.run import Run
from mm.data.lengths import HasLengths
from mm.data.order.balance import Groups, HasSizes, Sizes, dealt, even_groups, even_packs, spread
from mm.data.order.bucket import bucket_stream, sorted_in_turn
from mm.data.order.cost import SampleSizes
from mm.data.order.pack import Budget, fullest_packs
from mm.data.order.stream import Order, Step, in_turn, shuffled

PACKS_OF_STAGE = 4
"""Packs of even cost that each rank gets for each stage, if it has the samples.

A pipeline of p stages idles for (p - 1) / (m + p - 1) of its time with m equal microbatches: a fifth at most with four
for each stage.  Twice as many would save up to a tenth more, and leave half the tokens in each.
"""


def told_order(run: Run) -> str:
    """In which order the samples come, for people and for checkpoints: all of it that settings decide."""
    how = f"shuffled by --seed {run.args.seed}" if run.data.is_shuffled else "in the order of the files"
    return f"in buckets of like cost, {how}" if _has_buckets(run.data) else how


def _has_buckets(data: DataConfig) -> bool:
    is_dealt = data.packs or data.is_balanced or data.priority_mode == "data_reordering_img"
    return data.needs_lengths and not is_dealt


def order_of(run: Run, lengths: HasLengths, dp_rank: int, consumed_samples: int) -> Order:
    """What replica ``dp_rank`` trains on; ``lengths`` are those of all samples."""
    data, args = run.data, run.args
    micro_batch_size, dp_size, unit = args.micro_batch_size, run.dp_size, run.microbatch_unit
    stream = shuffled(len(lengths), args.seed, data.is_shuffled)
    deal = partial(in_turn, micro_batch_size=micro_batch_size, dp_size=dp_size)
    if data.needs_lengths:
        sizes = SampleSizes(run.model, lengths)
        budget = budget_of(run)
        if data.packs and data.is_balanced:
            deal = partial(packed_evenly, sizes=sizes, budget=budget, dp_size=dp_size, unit=unit,
                           num_stages=run.num_stages)
        elif data.packs:
            deal = partial(packed, sizes=sizes, budget=budget, dp_size=dp_size, unit=unit)
        elif data.is_balanced:
            deal = partial(balanced, sizes=sizes, micro_batch_size=micro_batch_size, dp_size=dp_size)
        elif data.priority_mode == "data_reordering_img":
            deal = partial(sorted_in_turn, sizes=sizes, micro_batch_size=micro_batch_size, dp_size=dp_size)
        else:
            assert _has_buckets(data), "there is no other sampler that needs lengths"
            stream = bucket_stream(sizes.all_costs(), args.seed, data.is_shuffled)
    return Order(stream, deal, run.global_batch_size, dp_rank, consumed_samples)


def budget_of(run: Run) -> Budget:
    """Of one pack."""
    return Budget(run.args.seq_length * run.args.micro_batch_size, run.data.packing_max_patches)


def packed(samples: np.ndarray, sizes: HasSizes, budget: Budget, dp_size: int, unit: int) -> list[Step]:
    """The fewest, fullest packs; ranks' tokens are about even, and each has a multiple of ``unit`` packs."""
    own = sizes.of(samples)
    packs = fullest_packs(own.num_tokens, own.num_patches, budget)
    if len(packs) < dp_size or (unit > 1 and len(packs) % (dp_size * unit)):
        packs = even_packs(Sizes(own.num_tokens, own.num_tokens, own.num_patches), budget, dp_size, unit)
    ranks = _dealt(_sums(own.num_tokens, packs), dp_size, unit)
    return _steps(samples, [[packs[number] for number in rank] for rank in ranks])


def packed_evenly(
    samples: np.ndarray, sizes: HasSizes, budget: Budget, dp_size: int, unit: int, num_stages: int
) -> list[Step]:
    """Packs of even cost, in multiples of ``unit``; ranks cost the same.

    As few for each rank as the budget allows, but enough for a pipeline of ``num_stages``: nothing is padded, so a pack
    that is half full costs half, while a pipeline without microbatches stands still.
    """
    own = sizes.of(samples)
    packs = even_packs(own, budget, dp_size, unit, PACKS_OF_STAGE * num_stages if num_stages > 1 else 1)
    return _steps(samples, spread(packs, _dealt(_sums(own.costs, packs), dp_size, unit), own, budget))


def _dealt(costs: np.ndarray, dp_size: int, unit: int) -> Groups:
    """With a unit, each rank has the same number of packs; else only their cost counts, and each has one at least."""
    of_each = len(costs) // dp_size
    return dealt(costs, dp_size, of_each, of_each) if unit > 1 else dealt(costs, dp_size, 1)


def balanced(samples: np.ndarray, sizes: HasSizes, micro_batch_size: int, dp_size: int) -> list[Step]:
    """Microbatches of ``micro_batch_size`` samples and of even cost, the same number for each rank; ranks' are even."""
    own, nothing = sizes.of(samples).costs, np.zeros_like(samples)
    groups = even_groups(own, micro_batch_size)
    of_each = len(groups) // dp_size
    ranks = dealt(_sums(own, groups), dp_size, of_each, of_each)
    return _steps(samples, spread(groups, ranks, Sizes(own, nothing, nothing), Budget(num_tokens=0)))


def _sums(values: np.ndarray, groups: Groups) -> np.ndarray:
    sizes = np.array([len(group) for group in groups])
    return np.add.reduceat(values[[one for group in groups for one in group]], np.cumsum(sizes) - sizes)


def _steps(samples: np.ndarray, ranks: list[Groups]) -> list[Step]:
    numbers = samples.tolist()
    return [[[numbers[one] for one in group] for group in groups] for groups in ranks]
