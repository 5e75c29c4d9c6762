"""How well the shipped pipeline lists use the stages, and which lists would use them best, by simulation.

    python -m benchmarks.balance.lists [--steps N] [SIZE ...]
    python -m benchmarks.balance.lists 7b --vision-layers 32 0 --language-layers 12 16

Nothing is trained: the microbatches of the shipped scripts are drawn from LLaVA-like samples
(``mm.plan.distributions``).  In each slot they take time in proportion to their FLOPs (``mm.model.flops``; the ViT is
frozen, as shipped), and they pass the pipeline in the order of a run.  Messages take no time, and a FLOP takes the same
time in the ViT as in the LLM.  Utilisation is the mean work of a stage over the length of the step, averaged over
``--steps`` drawn steps; for equal microbatches its bound is m / (m + p - 1).

The search (``mm.plan.lists``) starts from the shipped or the given lists.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.measure import command, report, shipped_model
from mm.batch import BatchTotals
from mm.config.model import ModelConfig
from mm.data.order.sequence import pipeline_order
from mm.model.flops import slot_flops
from mm.parallel.simulation import SlotCost, step_cost
from mm.plan import lists as layouts
from mm.plan.distributions import llava, totals_of
from mm.plan.lists import Costs, best_lists
from tests.files import table

BATCHES = {"7b": (4, 12), "32b": (2, 48), "72b": (1, 96)}
"""Size -> samples per microbatch and microbatches per step of a replica, as in the script; 3B has one stage."""
SEQ_LENGTH = 1024
Lists = tuple[tuple[int, ...], tuple[int, ...]]
"""Layers of the ViT and of the LLM on every stage."""


@dataclass(frozen=True)
class Workload:
    """Some steps of one script."""

    model: ModelConfig
    steps: Sequence[Sequence[BatchTotals]]
    """By step, the microbatches of one replica."""

    @classmethod
    def of(cls, size: str, num_steps: int) -> "Workload":
        """The microbatches of ``num_steps`` steps of the script of ``size``."""
        num_samples, num_microbatches = BATCHES[size]
        lengths = llava(num_steps * num_microbatches * num_samples)
        numbers = np.arange(len(lengths)).reshape(num_steps, num_microbatches, num_samples)
        totals = [[totals_of(lengths, one, SEQ_LENGTH) for one in step] for step in numbers]
        return cls(shipped_model(size), totals)

    @property
    def shipped(self) -> Lists:
        """The lists of ``model``."""
        return self.model.vision.pipeline_num_layers[0], self.model.language.pipeline_num_layers[0]

    @cached_property
    def _layers(self) -> list[list[list[SlotCost]]]:
        """By step and microbatch, the cost of each layer together with the modules beside it, in a pipeline with one
        layer per stage."""
        vision, language = (tower.num_layers for tower in (self.model.vision, self.model.language))
        model = with_lists(self.model, ((1,) * vision + (0,) * language, (0,) * vision + (1,) * language))
        return [slot_flops(model, step) for step in self.steps]

    def utilisation(self, lists: Lists) -> float:
        """The mean over the steps."""
        spans = list(_spans(lists))
        return fmean(_utilisation([[_sum(layers, span) for span in spans] for layers in step]) for step in self._layers)

    def work(self, lists: Lists) -> list[float]:
        """What each stage works, over all steps."""
        costs = [[_sum(layers, span) for step in self._layers for layers in step] for span in _spans(lists)]
        return [sum(one.forward + one.backward for one in stage) for stage in costs]

    def imbalance(self, lists: Lists) -> float:
        """The busiest stage's work over the mean: utilisation is at most its inverse."""
        work = self.work(lists)
        return max(work) / fmean(work)


def best(workload: Workload) -> tuple[float, Lists]:
    """The lists that no move of one layer improves, searched from the workload's own, and their utilisation first."""
    found, cost = best_lists(layouts.Lists.of(workload.model), Costs(
        costs=lambda some: np.array([1 / workload.utilisation(_flat(one)) for one in some]),
        least=lambda some: np.array([workload.imbalance(_flat(one)) for one in some]),
        unevenness=lambda some: np.array([sum(work**2 for work in workload.work(_flat(one))) for one in some]),
        fits=lambda _: True))  # fmt: skip
    return 1 / cost, _flat(found)


def _flat(lists: layouts.Lists) -> Lists:
    return lists.vision[0], lists.language[0]


def with_lists(model: ModelConfig, lists: Lists) -> ModelConfig:
    """``model`` with the given layers on each stage."""
    vision, language = lists
    return layouts.Lists((vision,), (language,)).applied(model)


def _spans(lists: Lists) -> Iterator[list[range]]:
    """The layers of each stage, counted over both towers."""
    vision_end, language_end = 0, sum(lists[0])
    for num_vision, num_language in zip(*lists, strict=True):
        yield [range(vision_end, vision_end + num_vision), range(language_end, language_end + num_language)]
        vision_end, language_end = vision_end + num_vision, language_end + num_language


def _sum(layers: Sequence[SlotCost], spans: Sequence[range]) -> SlotCost:
    numbers = [number for span in spans for number in span]
    return SlotCost(sum(layers[one].forward for one in numbers), sum(layers[one].backward for one in numbers))


def _utilisation(costs: list[list[SlotCost]]) -> float:
    num_stages = len(costs[0])
    ordered = [costs[number] for number in pipeline_order(costs, num_stages)]
    work = sum(slot.forward + slot.backward for slots in costs for slot in slots)
    return work / num_stages / step_cost(ordered, num_stages)


HEAD = ("script", "lists", "utilisation", "best lists found", "utilisation", "bound")


def measure(size: str, num_steps: int, lists: Lists | None, searches: bool) -> dict[str, Any]:
    """The utilisation with ``lists`` (None: the shipped ones), and with the best that a search from them finds."""
    workload = Workload.of(size, num_steps)
    if lists is not None:
        workload = Workload(with_lists(workload.model, lists), workload.steps)
    num_stages, num_microbatches = len(workload.shipped[0]), BATCHES[size][1]
    found, nearby = best(workload) if searches else (None, None)
    return {"size": size, "lists": workload.shipped, "utilisation": workload.utilisation(workload.shipped),
            "best_lists": nearby, "best_utilisation": found,
            "bound": num_microbatches / (num_microbatches + num_stages - 1)}  # fmt: skip


def main(argv: list[str]) -> None:
    parser = command(__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--vision-layers", nargs="+", type=int, help="of one size: ViT layers of each stage")
    parser.add_argument("--language-layers", nargs="+", type=int, help="of one size: LLM layers of each stage")
    parser.add_argument("--search", action=argparse.BooleanOptionalAction, default=True, help="for better lists")
    parser.add_argument("sizes", nargs="*", default=list(BATCHES))
    flags = parser.parse_args(argv)
    given = flags.vision_layers, flags.language_layers
    if any(given) and (not all(given) or len(flags.sizes) != 1):
        parser.error("--vision-layers and --language-layers go together, with one size")
    lists = (tuple(flags.vision_layers), tuple(flags.language_layers)) if any(given) else None
    rows = [measure(size, flags.steps, lists, flags.search) for size in flags.sizes]
    print("\n".join(table(HEAD, map(_shown, rows))))
    report(rows, flags.output, prints=False)


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    lists, nearby = (" + ".join(str(list(numbers)) for numbers in row[name] or ()) for name in ("lists", "best_lists"))
    best_utilisation = "" if row["best_utilisation"] is None else f"{row['best_utilisation']:.3f}"
    return row["size"], lists, f"{row['utilisation']:.3f}", nearby, best_utilisation, f"{row['bound']:.3f}"


if __name__ == "__main__":
    main(sys.argv[1:])
