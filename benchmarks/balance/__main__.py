"""How evenly samplers distribute the cost of a step, how full packs are, and how long planning takes.

    python -m benchmarks.balance [--quick] [--output F]

Nothing is trained: samples are arrays of lengths (``mm.plan.distributions``), a microbatch costs its FLOPs in the
shipped 7B model, whose ViT is frozen (``mm.model.flops``), and a step takes as long as its costliest rank.  A pipeline
of four stages is simulated with the microbatches in the order of a run.  Without packing a microbatch is one sample;
packs hold at most 8,192 tokens.  The last table shows which goals are reached.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.balance.lists import with_lists
from benchmarks.measure import command, report, shipped_model, versions
from mm.config.model import ModelConfig
from mm.data.lengths import Lengths
from mm.data.order.cost import SampleSizes
from mm.data.order.pack import Budget, fullest_packs
from mm.data.order.sampler import SAMPLERS, BatchShares
from mm.data.order.sequence import pipeline_order
from mm.data.order.stream import StepSamples, Stream, shuffled
from mm.model.flops import slot_flops
from mm.parallel.simulation import step_cost
from mm.plan.distributions import DISTRIBUTIONS, SEQ_LENGTH, llava, totals_of
from tests.files import table

SAMPLES_PER_RANK = 32
"""Number of samples per data-parallel rank in a global batch."""
BATCHES = (32, 35, 64, 128, 256)
"""Samples per rank in a global batch, for the table of how full packs are."""
FEW_SAMPLES = 65_536
SEED = 1234
STAGES = ((32, 0, 0, 0), (6, 8, 8, 6))
"""Layers of ViT and LLM of the simulated pipeline."""
BUDGET = Budget(SEQ_LENGTH)
FULLEST_PACKS, BALANCED_PACKS = "BaseRandomBatchSampler with packing", "BalancedBatchSampler with packing"

Planned = Callable[[int], list[StepSamples]]
"""From the number of a step to the samples of each rank."""
SETS = ("llava", "documents", "videos")
"""Names of the compared ``mm.plan.distributions``."""


class Samples:
    """A set of samples, with the cost of each."""

    def __init__(self, model: ModelConfig, lengths: Lengths) -> None:
        self.model, self.lengths = model, lengths
        self.sizes = SampleSizes(model, lengths).of(np.arange(len(lengths)))

    def samplers(self, dp_size: int, of_rank: int = SAMPLES_PER_RANK, num_stages: int = 1) -> dict[str, Planned]:
        """Plans by name in ``mm.data.order.sampler``.  A microbatch is one sample, or a pack where the name says so."""
        shares = BatchShares(dp_size, BUDGET, num_stages=num_stages)
        orders = {name: sampler.order(self.sizes, shares, SEED) for name, sampler in SAMPLERS.items()}
        return {name: partial(_planned, stream, deal, dp_size * of_rank) for name, (stream, deal) in orders.items()}

    def measure(self, plan: Planned, num_steps: int) -> dict[str, float]:
        """Means over steps, and the worst step's imbalance."""
        steps = [[[self.sizes.costs[one].sum() for one in rank] for rank in plan(number)]
                 for number in range(num_steps)]  # fmt: skip
        of_ranks = [np.array([sum(rank) for rank in step]) for step in steps]
        imbalance = [ranks.max() / ranks.mean() for ranks in of_ranks]
        whole = [np.concatenate([np.array(rank) for rank in step]) for step in steps]
        tokens = [self.sizes.num_tokens[one].sum() for number in range(num_steps) for rank in plan(number)
                  for one in rank]  # fmt: skip
        return {
            "step": float(np.mean(imbalance)), "worst_step": float(max(imbalance)),
            "turn": float(np.mean([_turns(step) for step in steps])),
            "microbatches": float(np.mean([one.max() / one.mean() for one in whole])),
            "full": float(np.mean(tokens) / SEQ_LENGTH), "of_rank": len(tokens) / num_steps / len(steps[0]),
            "cost": float(np.mean([ranks.max() for ranks in of_ranks])),
        }  # fmt: skip

    def limits(self, dp_size: int, num_steps: int) -> dict[str, float]:
        """Bounds for packs if each rank has the same number of them: how full they can be, and the least ratio of the
        costliest pack to the mean.  The costliest pack costs at least as much as the costliest sample."""
        stream, batch = shuffled(len(self.lengths), SEED), dp_size * SAMPLES_PER_RANK
        full, above = [], []
        for number in range(num_steps):
            own = self.sizes.of(stream.samples(number * batch, batch))
            num_packs = -(-int(own.num_tokens.sum()) // (SEQ_LENGTH * dp_size)) * dp_size
            full.append(own.num_tokens.sum() / (num_packs * SEQ_LENGTH))
            above.append(max(1.0, own.costs.max() * num_packs / own.costs.sum()))
        return {"full": float(np.mean(full)), "microbatches": float(np.mean(above))}

    def pipelined(self, plan: Planned, num_steps: int) -> float:
        """The simulated time of the slowest replica, on four stages."""
        model, found = with_lists(self.model, STAGES), []
        for number in range(num_steps):
            times = []
            for rank in plan(number):
                costs = slot_flops(model, [totals_of(self.lengths, one) for one in rank])
                order = pipeline_order(costs, len(STAGES[0]))
                times.append(step_cost([costs[one] for one in order], len(STAGES[0])))
            found.append(max(times))
        return float(np.mean(found))


def _planned(
    stream: Stream, deal: Callable[[np.ndarray], list[StepSamples]], batch: int, number: int
) -> list[StepSamples]:
    return deal(stream.samples(number * batch, batch))


def _turns(step: list[list[int]]) -> float:
    """The mean ratio of the costliest rank's microbatch to the mean, over the turns in which all ranks have one."""
    common = min(map(len, step))
    table = np.array([rank[:common] for rank in step])
    return float((table.max(axis=0) / table.mean(axis=0)).mean())


def planning(model: ModelConfig, num_samples: int) -> dict[str, float]:
    """CPU seconds to plan all steps of an epoch for 64 ranks, and to pack the whole epoch at once."""
    samples = Samples(model, llava(num_samples))
    seconds = step_seconds(samples, num_samples // (64 * SAMPLES_PER_RANK))
    started = time.process_time()
    packs = fullest_packs(samples.sizes.num_tokens, samples.sizes.num_patches, BUDGET)
    ended = time.process_time()
    return {
        "num_samples": num_samples, "epoch_seconds": sum(seconds), "packing_seconds": ended - started,
        "full": float(samples.sizes.num_tokens.sum() / SEQ_LENGTH / len(packs)),
    }  # fmt: skip


def step_seconds(samples: Samples, num_steps: int) -> list[float]:
    """CPU seconds to plan each of ``num_steps`` steps of 2,048 samples for 64 ranks, as a run does."""
    plan, seconds = samples.samplers(64)[BALANCED_PACKS], []
    plan(0)  # draws the epoch's order
    for number in range(num_steps):
        started = time.process_time()
        plan(number)
        seconds.append(time.process_time() - started)
    return seconds


def measure(is_quick: bool) -> dict[str, Any]:
    model = shipped_model("7b")
    ranks = (8,) if is_quick else (8, 64, 512)
    rows, limits, sets = [], [], {}
    for name in SETS:
        samples = Samples(model, DISTRIBUTIONS[name](4096 if is_quick else FEW_SAMPLES))
        tokens, costs = samples.sizes.num_tokens, samples.sizes.costs
        sets[name] = {"mean_tokens": float(tokens.mean()), "max_tokens": int(tokens.max()),
                      "mean_patches": float(samples.sizes.num_patches.mean()),
                      "cost_scatter": float(costs.std() / costs.mean()),
                      "step_seconds": float(np.median(step_seconds(samples, 2 if is_quick else 32)))}  # fmt: skip
        for dp_size in ranks:
            of_plain: dict[str, float] = {}
            num_steps = 2 if is_quick or dp_size == 512 else 8
            limits.append({"set": name, "dp_size": dp_size, **samples.limits(dp_size, num_steps)})
            for sampler, plan in samples.samplers(dp_size).items():
                found = samples.measure(plan, num_steps)
                if dp_size == 8:
                    staged = samples.samplers(dp_size, num_stages=len(STAGES[0]))[sampler]
                    found["pipelined"] = samples.pipelined(staged, 1 if is_quick else 3)
                of_plain = of_plain or found
                found |= {f"{key}_of_plain": found[key] / of_plain[key] for key in ("cost", "pipelined")
                          if key in found}  # fmt: skip
                rows.append({"set": name, "dp_size": dp_size, "sampler": sampler, **found})
    samples = Samples(model, llava(4096 if is_quick else FEW_SAMPLES))
    full = []
    for of_rank in BATCHES[:2] if is_quick else BATCHES:
        by_name = samples.samplers(ranks[:2][-1], of_rank)
        full += [{"of_rank_samples": of_rank, "dp_size": ranks[:2][-1], "sampler": name,
                  **samples.measure(by_name[name], 2 if is_quick else 4)}
                 for name in (FULLEST_PACKS, BALANCED_PACKS)]  # fmt: skip
    return {"versions": versions(), "sets": sets, "rows": rows, "full": full,
            "limits": limits, "planning": planning(model, 20_480 if is_quick else 1_000_000)}  # fmt: skip


class Goal(NamedTuple):
    """A goal, and whether it was reached."""

    what: str
    bound: str
    value: float
    is_reached: bool


def goals(found: dict[str, Any]) -> list[Goal]:
    """Judge every goal."""
    by = {(row["set"], row["dp_size"], row["sampler"]): row for row in found["rows"]}
    plan = found["planning"]
    judged = []

    def at_most(what: str, bound: float, value: float) -> None:
        judged.append(Goal(what, f"at most {bound:g}", value, value <= bound))

    def at_least(what: str, bound: float, value: float) -> None:
        judged.append(Goal(what, f"at least {bound:g}", value, value >= bound))

    for dp_size, bound in ((8, 1.01), (64, 1.02)):
        for name in SETS:
            if row := by.get((name, dp_size, BALANCED_PACKS)):
                at_most(f"{name}, {dp_size} ranks: costliest rank over the mean, worst step", bound, row["worst_step"])
                at_most(f"{name}, {dp_size} ranks: costliest microbatch over the mean", 1.05, row["microbatches"])
    at_least("llava: the fullest packs of all samples, full", 0.98, plan["full"])
    last = found["full"][-1]
    at_least(f"llava, {last['dp_size']} ranks, {last['of_rank_samples']} samples each: balanced packs, full", 0.97,
             last["full"])
    for dp_size in (8, 64, 512):
        if row := by.get(("documents", dp_size, BALANCED_PACKS)):
            at_most(f"documents, {dp_size} ranks: step time over the plain sampler's", 0.8, row["cost_of_plain"])
    for name, one in found["sets"].items():
        at_most(f"{name}: seconds to plan a step, 2,048 samples on 64 ranks", 0.010, one["step_seconds"])
    at_most(f"seconds to plan an epoch of {plan['num_samples']:,}", 30, plan["epoch_seconds"])
    at_most(f"seconds to pack {plan['num_samples']:,} lengths", 20, plan["packing_seconds"])
    return judged


SAMPLER_HEAD = ("set", "ranks", "sampler", "rank, mean", "rank, worst", "same turn", "all microbatches", "full",
                "microbatches of a rank", "time", "time, 4 stages")  # fmt: skip
FULL_HEAD = ("samples of a rank", "ranks", "sampler", "full", "microbatches of a rank", "rank, worst",
             "all microbatches")  # fmt: skip


def shown(found: dict[str, Any]) -> str:
    """The figures as tables of Markdown."""
    rows = [(row["set"], row["dp_size"], row["sampler"], f"{row['step']:.4f}", f"{row['worst_step']:.4f}",
             f"{row['turn']:.3f}", f"{row['microbatches']:.3f}",
             f"{row['full']:.1%}" if "packing" in row["sampler"] else "", f"{row['of_rank']:.1f}",
             f"{row['cost_of_plain']:.3f}", f"{row['pipelined_of_plain']:.3f}" if "pipelined_of_plain" in row else "")
            for row in found["rows"]]  # fmt: skip
    full = [(row["of_rank_samples"], row["dp_size"], row["sampler"], f"{row['full']:.1%}", f"{row['of_rank']:.2f}",
             f"{row['worst_step']:.4f}", f"{row['microbatches']:.3f}") for row in found["full"]]
    limits = [(one["set"], one["dp_size"], f"{one['full']:.1%}", f"{one['microbatches']:.3f}")
              for one in found["limits"]]  # fmt: skip
    judged = [(what, bound, f"{value:.5g}", "reached" if is_reached else "**missed**")
              for what, bound, value, is_reached in found["goals"]]  # fmt: skip
    tables = (table(SAMPLER_HEAD, rows), table(FULL_HEAD, full),
              table(("set", "ranks", "full, at most", "all microbatches, at least"), limits),
              table(("goal", "bound", "measured", ""), judged))
    return "\n\n".join("\n".join(lines) for lines in tables)


def main(argv: list[str]) -> None:
    parser = command(__doc__)
    parser.add_argument("--quick", action="store_true", help="8 ranks and few samples: only shows that it runs")
    flags = parser.parse_args(argv)
    found = measure(flags.quick)
    found["goals"] = goals(found)
    print(shown(found))
    report(found, flags.output, prints=False)


if __name__ == "__main__":
    main(sys.argv[1:])
