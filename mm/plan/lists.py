"""Pipeline lists: the search for those with the shortest step, and their judgement on a run's own data.

If few lists are possible, all of them are compared, so no others are better.  Otherwise the search moves one layer at a
time between two slots while that helps.  Asking about many lists together costs hardly more than asking about one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations_with_replacement, pairwise
from typing import Any

import numpy as np

from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.console import ongoing
from mm.cost.predict import Predictor
from mm.cost.stage_memory import PeakMemory
from mm.cost.workload import Workload
from mm.placement import PipelineLayout, Placement

LEAST_GAIN = 1e-4
"""A layer moves only if the step gets shorter by this share."""
MAX_COMPARED = 1000
"""If no more lists than this are possible, all are compared."""
MANY_SLOTS, MAX_DISTANCE = 12, 1
"""With more slots than the first, layers move only between slots at most the second apart."""
MAX_TRIED = 60
"""Most moves of a round whose cost is computed: those with the lowest bounds."""
_NUM_SEARCHED = 2
"""Steps that ``rate_lists`` simulates to search; it rates on all."""


@dataclass(frozen=True)
class Lists:
    """Layers of the ViT and of the LLM, by ``[chunk][stage]``."""

    vision: PipelineLayout
    language: PipelineLayout

    @classmethod
    def of(cls, model: ModelConfig) -> "Lists":
        """The lists of ``model``."""
        return cls(model.vision.pipeline_num_layers, model.language.pipeline_num_layers)

    @classmethod
    def spread(cls, num_vision: int, num_language: int, num_stages: int, num_chunks: int) -> "Lists":
        """Lists with about the same number of layers in each slot."""
        num_layers, num_slots = num_vision + num_language, num_stages * num_chunks
        return cls._ended([num_layers * (slot + 1) // num_slots for slot in range(num_slots)], num_vision, num_stages)

    @classmethod
    def even(cls, vision: np.ndarray, language: np.ndarray, num_stages: int, num_chunks: int) -> "Lists":
        """Lists whose slots have about the same work, given the work of each layer."""
        num_slots, done = num_stages * num_chunks, np.cumsum(np.concatenate([vision, language]))
        middles = done - np.concatenate([vision, language]) / 2
        ends = np.searchsorted(middles, done[-1] * np.arange(1, num_slots + 1) / num_slots)
        return cls._ended(ends.tolist(), len(vision), num_stages)

    @classmethod
    def _ended(cls, ends: Sequence[int], num_vision: int, num_stages: int) -> "Lists":
        """``ends``: number of layers up to the end of each slot, counting the ViT's before the LLM's."""
        spans = list(pairwise((0, *ends)))
        vision = [min(end, num_vision) - min(start, num_vision) for start, end in spans]
        language = [end - start - count for (start, end), count in zip(spans, vision, strict=True)]
        return cls(_nested(vision, num_stages), _nested(language, num_stages))

    def applied(self, model: ModelConfig) -> ModelConfig:
        """``model`` with these lists."""
        return replace(model, vision=replace(model.vision, pipeline_num_layers=self.vision),
                       language=replace(model.language, pipeline_num_layers=self.language))

    @cached_property
    def placement(self) -> Placement:
        """The placement of all layers."""
        return Placement.of(self.vision, self.language)

    def values(self) -> tuple[list[Any], list[Any]]:
        """As in the model JSON: flat with one chunk."""
        both = [[*map(list, one)] for one in (self.vision, self.language)]
        vision, language = (chunks[0] if len(chunks) == 1 else chunks for chunks in both)
        return vision, language

    def moves(self) -> Iterator["Lists"]:
        """Every legal pair of lists that differs in the slot of one layer; with many slots, only to slots nearby."""
        most = self._num_slots if self._num_slots <= MANY_SLOTS else MAX_DISTANCE
        yield from self._moves(lambda giver, taker: 0 < abs(giver - taker) <= most)

    def moves_between(self, giver: int, taker: int) -> Iterator["Lists"]:
        """Every legal pair of lists that moves one layer from stage ``giver`` to stage ``taker``."""
        num_stages = len(next(iter(self.vision)))
        yield from self._moves(lambda one, other: (one % num_stages, other % num_stages) == (giver, taker))

    def shifts(self) -> Iterator["Lists"]:
        """Every legal pair of lists in which one slot ends at another layer; slots in between become empty."""
        num_vision, num_layers, num_stages = sum(map(sum, self.vision)), self._num_layers, len(next(iter(self.vision)))
        *ends, _ = accumulate(vision + language for vision, language in zip(*self._counts, strict=True))
        for slot, here in enumerate(ends):
            for end in (one for one in range(num_layers + 1) if one != here):
                before, after = (min(one, end) for one in ends[:slot]), (max(one, end) for one in ends[slot + 1 :])
                yield self._ended((*before, end, *after, num_layers), num_vision, num_stages)

    def _moves(self, is_wanted: Callable[[int, int], bool]) -> Iterator["Lists"]:
        for name in ("vision", "language"):
            layout: PipelineLayout = getattr(self, name)
            num_stages, counts = len(next(iter(layout))), [count for chunk in layout for count in chunk]
            for giver in (slot for slot, count in enumerate(counts) if count):
                for taker in (slot for slot in range(len(counts)) if is_wanted(giver, slot)):
                    moved = replace(self, **{name: _nested(
                        [count - (slot == giver) + (slot == taker) for slot, count in enumerate(counts)],
                        num_stages)})
                    if moved.is_legal:
                        yield moved

    @property
    def num_possible(self) -> int:
        """How many legal lists the same layers and slots have."""
        return math.comb(self._num_layers + self._num_slots - 1, self._num_slots - 1)

    def possible(self) -> Iterator["Lists"]:
        """All legal lists of the same layers and slots."""
        num_vision, num_language = (sum(map(sum, one)) for one in (self.vision, self.language))
        num_layers, num_stages = num_vision + num_language, len(next(iter(self.vision)))
        for ends in combinations_with_replacement(range(num_layers + 1), self._num_slots - 1):
            yield self._ended((*ends, num_layers), num_vision, num_stages)

    @property
    def _counts(self) -> tuple[list[int], list[int]]:
        """Layers of the ViT and of the LLM in each slot."""
        vision, language = ([count for chunk in one for count in chunk] for one in (self.vision, self.language))
        return vision, language

    @property
    def _num_layers(self) -> int:
        return sum(map(sum, (*self.vision, *self.language)))

    @property
    def _num_slots(self) -> int:
        return sum(map(len, self.vision))

    @property
    def is_legal(self) -> bool:
        """Whether no LLM layer comes before the last ViT layer, as ``mm.placement.layout_problems`` has it."""
        vision, language = self._counts
        return not any(language[: max(slot for slot, count in enumerate(vision) if count)])


@dataclass(frozen=True)
class Costs:
    """What the search asks about lists, many at a time; each answer is float64 or bool [num_lists]."""

    costs: Callable[[Sequence[Lists]], np.ndarray]
    """The cost to minimize: the simulated step."""
    least: Callable[[Sequence[Lists]], np.ndarray]
    """A quick lower bound of it."""
    unevenness: Callable[[Sequence[Lists]], np.ndarray]
    """How unevenly the stages are loaded; quick to compute."""
    fits: Callable[[Lists], bool]


def best_lists(start: Lists, of: Costs, is_even: bool = False) -> tuple[Lists, float]:
    """The lists of least cost that fit, or ``start``, and that cost.

    If more than ``MAX_COMPARED`` are possible, it descends from ``start`` and, unless that ``is_even`` already, from
    the lists that load the stages most evenly.
    """
    if start.num_possible <= MAX_COMPARED:
        return _better(start, float(of.costs([start])[0]), list(start.possible()), of)
    even = start if is_even else evened(start, of)
    found = [_descended(one, of) for one in dict.fromkeys((start, even)) if one == start or of.fits(one)]
    return min(found, key=lambda one: one[1])


def evened(start: Lists, of: Costs) -> Lists:
    """The lists that load the stages most evenly, found by moves of one layer."""
    best, least = start, float(of.unevenness([start])[0])
    while moves := list(best.moves()):
        found = of.unevenness(moves)
        number = int(found.argmin())
        if found[number] >= least:
            break
        best, least = moves[number], float(found[number])
    return best


def _better(start: Lists, least: float, others: Sequence[Lists], of: Costs) -> tuple[Lists, float]:
    """The cheapest of ``others`` that fits, if it costs noticeably less than ``least``, which ``start`` costs."""
    bounds = of.least(others)
    worth = [one for one, bound in zip(others, bounds, strict=True) if bound < least]
    costs = of.costs(worth) if worth else np.zeros(0)
    for number in costs.argsort(kind="stable"):
        if costs[number] >= least * (1 - LEAST_GAIN):
            break
        if of.fits(worth[number]):
            return worth[number], float(costs[number])
    return start, least


def _descended(start: Lists, of: Costs) -> tuple[Lists, float]:
    """Take the best move of one layer until none helps, then the best shift of an end, until none of either helps."""
    best, least = start, float(of.costs([start])[0])
    while True:
        for neighbours in (best.moves, best.shifts):
            others = list(neighbours())
            if len(others) > MAX_TRIED:
                others = [others[number] for number in of.least(others).argsort(kind="stable")[:MAX_TRIED]]
            found, cost = _better(best, least, others, of)
            if found != best:
                break
        else:
            return best, least
        best, least = found, cost


def _nested(counts: list[int], num_stages: int) -> PipelineLayout:
    return tuple(tuple(counts[first : first + num_stages]) for first in range(0, len(counts), num_stages))


@dataclass(frozen=True)
class RatedLists:
    """Lists, with the time and memory that their pipelines need."""

    lists: Lists
    seconds: float
    """Mean pipeline of the slowest replica; in forward FLOPs without a calibration."""
    busy: float
    """Mean work of that replica's stages during it."""
    peak_bytes: int
    """Memory of the fullest rank."""


def rate_lists(
    run: Run, predictor: Predictor, workload: Workload, max_bytes: int | None
) -> tuple[RatedLists, RatedLists, float]:
    """The lists of ``run``, the best found (maybe the same), and the mean pipeline of equal stages and microbatches."""
    present, memory = Lists.of(run.model), PeakMemory(run)
    searched = Workload(workload.steps[:_NUM_SEARCHED])
    with ongoing("searching for better lists"):
        found, _ = best_lists(present, list_costs(predictor, memory, searched, max_bytes))
    both = list(dict.fromkeys((present, found)))
    pipelines = predictor.pipelines(workload, [one.placement for one in both])
    means = zip(both, pipelines.seconds.mean(axis=0).tolist(), pipelines.busy.mean(axis=0).tolist(), strict=True)
    rated = [RatedLists(one, seconds, busy, max(memory.of_stages(one.placement))) for one, seconds, busy in means]
    return rated[0], min(rated, key=lambda one: one.seconds), float(pipelines.even[:, 0].mean())


def list_costs(
    predictor: Predictor, memory: PeakMemory, workload: Workload, max_bytes: int | None, is_rough: bool = False
) -> Costs:
    """The costs that the search for lists asks for.  ``is_rough``: see ``Predictor.pipelines``."""

    def placements(some: Sequence[Lists]) -> list[Placement]:
        return [one.placement for one in some]

    return Costs(
        costs=lambda some: predictor.pipelines(workload, placements(some), is_rough).seconds.mean(axis=0),
        least=lambda some: predictor.least(workload, placements(some)),
        unevenness=lambda some: predictor.unevenness(workload, placements(some)),
        fits=lambda one: max_bytes is None or max(memory.of_stages(one.placement)) <= max_bytes)
