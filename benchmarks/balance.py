"""How evenly samplers distribute the cost of a step, how full packs are, and how long planning takes.

    python -m benchmarks.balance [--quick] [--output F]

Nothing is trained: samples are arrays of lengths (``mm.plan.layouts``), a microbatch costs its FLOPs in the
shipped 7B model, whose ViT is frozen (``mm.model.flops``), and a step takes as long as its costliest rank.  Without
packing a microbatch is one sample; packs hold at most 8,192 tokens.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measure import command, report, shipped_model, versions
from mm.config.model import ModelConfig
from mm.data.sample import Lengths
from mm.data.sampler.balance import Budget, fullest_packs
from mm.data.sampler.cost import SampleSizes
from mm.data.sampler.sampler import SAMPLERS, BatchShares, StepSamples, Stream
from mm.plan.layouts import DISTRIBUTIONS, SEQ_LENGTH, llava
from tests.files import table

SAMPLES_PER_RANK = 32
"""Number of samples per data-parallel rank in a global batch."""
SEED, BUDGET = 1234, Budget(SEQ_LENGTH)
BALANCED_PACKS = "BalancedBatchSampler with packing"
SETS = ("llava", "documents", "videos")
"""Names of the compared ``mm.plan.layouts``."""
Planned = Callable[[int], list[StepSamples]]
"""From the number of a step to the samples of each rank."""


class Samples:
    """A set of samples, with the cost of each."""

    def __init__(self, model: ModelConfig, lengths: Lengths) -> None:
        self.lengths, self.sizes = lengths, SampleSizes(model, lengths).of(np.arange(len(lengths)))

    def samplers(self, dp_size: int) -> dict[str, Planned]:
        """Plans by name of the sampler.  A microbatch is one sample, or a pack where the name says so."""
        shares = BatchShares(dp_size, BUDGET)
        orders = {name: sampler.order(self.sizes, shares, SEED) for name, sampler in SAMPLERS.items()}
        return {name: partial(_planned, stream, deal, dp_size) for name, (stream, deal) in orders.items()}

    def measure(self, plan: Planned, num_steps: int) -> dict[str, float]:
        """Means over steps, and the worst step's imbalance."""
        steps = [plan(number) for number in range(num_steps)]
        costs = [[np.array([self.sizes.costs[one].sum() for one in rank]) for rank in step] for step in steps]
        of_ranks = [np.array([rank.sum() for rank in step]) for step in costs]
        imbalance = [ranks.max() / ranks.mean() for ranks in of_ranks]
        tokens = [self.sizes.num_tokens[one].sum() for step in steps for rank in step for one in rank]
        whole = [np.concatenate(step) for step in costs]
        return {"step": float(np.mean(imbalance)), "worst_step": float(max(imbalance)),
                "microbatches": float(np.mean([one.max() / one.mean() for one in whole])),
                "full": float(np.mean(tokens) / SEQ_LENGTH), "of_rank": len(tokens) / num_steps / len(steps[0]),
                "cost": float(np.mean([ranks.max() for ranks in of_ranks]))}  # fmt: skip


def _planned(
    stream: Stream, deal: Callable[[np.ndarray], list[StepSamples]], dp_size: int, number: int
) -> list[StepSamples]:
    batch = dp_size * SAMPLES_PER_RANK
    return deal(stream.samples(number * batch, batch))


def planning(model: ModelConfig, num_samples: int) -> dict[str, float]:
    """CPU seconds to plan all steps of an epoch for 64 ranks as a run does, and to pack the whole epoch at once."""
    samples = Samples(model, llava(num_samples))
    plan = samples.samplers(64)[BALANCED_PACKS]
    plan(0)  # draws the epoch's order
    started = time.process_time()
    for number in range(num_samples // (64 * SAMPLES_PER_RANK)):
        plan(number)
    planned = time.process_time()
    packs = fullest_packs(samples.sizes.num_tokens, samples.sizes.num_patches, BUDGET)
    return {"num_samples": num_samples, "epoch_seconds": planned - started,
            "packing_seconds": time.process_time() - planned,
            "full": float(samples.sizes.num_tokens.sum() / SEQ_LENGTH / len(packs))}  # fmt: skip


def measure(is_quick: bool) -> dict[str, Any]:
    model, rows = shipped_model("7b"), []
    for name in SETS:
        samples = Samples(model, DISTRIBUTIONS[name](4096 if is_quick else 65_536))
        for dp_size in (8,) if is_quick else (8, 64, 512):
            of_plain: dict[str, float] = {}
            for sampler, plan in samples.samplers(dp_size).items():
                found = samples.measure(plan, 2 if is_quick or dp_size == 512 else 8)
                of_plain = of_plain or found
                found["cost_of_plain"] = found["cost"] / of_plain["cost"]
                rows.append({"set": name, "dp_size": dp_size, "sampler": sampler, **found})
    return {"versions": versions(), "rows": rows, "planning": planning(model, 20_480 if is_quick else 1_000_000)}


def shown(found: dict[str, Any]) -> str:
    """The figures as a table of Markdown."""
    head = ("set", "ranks", "sampler", "rank, mean", "rank, worst", "all microbatches", "full",
            "microbatches of a rank", "time")  # fmt: skip
    rows = [(row["set"], row["dp_size"], row["sampler"], f"{row['step']:.4f}", f"{row['worst_step']:.4f}",
             f"{row['microbatches']:.3f}", f"{row['full']:.1%}" if "packing" in row["sampler"] else "",
             f"{row['of_rank']:.1f}", f"{row['cost_of_plain']:.3f}")
            for row in found["rows"]]  # fmt: skip
    plan = found["planning"]
    return "\n".join([*table(head, rows), "", (
        f"{plan['num_samples']:,} samples: {plan['epoch_seconds']:.1f} s to plan an epoch for 64 ranks, "
        f"{plan['packing_seconds']:.1f} s to pack it at once, {plan['full']:.1%} full")])


def main(argv: list[str]) -> None:
    parser = command(__doc__)
    parser.add_argument("--quick", action="store_true", help="8 ranks and few samples: only shows that it runs")
    flags = parser.parse_args(argv)
    found = measure(flags.quick)
    print(shown(found))
    report(found, flags.output, prints=False)


if __name__ == "__main__":
    main(sys.argv[1:])
