"""The search for the pipeline lists with the shortest step.  The caller says what a step costs and what fits.

If few lists are possible, all of them are compared, so no others are better.  Otherwise the search moves one layer at a
time between two slots while that helps.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, pairwise
from typing import Any

from mm.config.model import ModelConfig
from mm.placement import PipelineLayout, layout_problems

LEAST_GAIN = 1e-4
"""A layer moves only if the step gets shorter by this share."""
MAX_COMPARED = 1000
"""If no more lists than this are possible, all are compared."""
NUM_TRIED = 8
"""Moves of each round whose cost is computed: the most promising ones."""


@dataclass(frozen=True)
class Lists:
    """Layers of the ViT and of the LLM, by ``[chunk][stage]``."""

    vision: PipelineLayout
    language: PipelineLayout

    @classmethod
    def of(cls, model: ModelConfig) -> "Lists":
        """The lists of ``model``."""
        return cls(model.vision.pipeline_num_layers, model.language.pipeline_num_layers)

    def applied(self, model: ModelConfig) -> ModelConfig:
        """``model`` with these lists."""
        return replace(model, vision=replace(model.vision, pipeline_num_layers=self.vision),
                       language=replace(model.language, pipeline_num_layers=self.language))

    @property
    def order(self) -> tuple[PipelineLayout, PipelineLayout]:
        """Decides between lists of equal cost."""
        return self.vision, self.language

    def values(self) -> tuple[list[Any], list[Any]]:
        """As in the model JSON: flat with one chunk."""
        both = [[*map(list, one)] for one in (self.vision, self.language)]
        vision, language = (chunks[0] if len(chunks) == 1 else chunks for chunks in both)
        return vision, language

    def moves(self) -> Iterator["Lists"]:
        """Every legal pair of lists that differs in the slot of one layer."""
        for name in ("vision", "language"):
            layout: PipelineLayout = getattr(self, name)
            num_stages, counts = len(next(iter(layout))), [count for chunk in layout for count in chunk]
            for giver in (slot for slot, count in enumerate(counts) if count):
                for taker in (slot for slot in range(len(counts)) if slot != giver):
                    moved = replace(self, **{name: _nested(
                        [count - (slot == giver) + (slot == taker) for slot, count in enumerate(counts)],
                        num_stages)})
                    if moved.is_legal:
                        yield moved

    @property
    def num_possible(self) -> int:
        """How many legal lists the same layers and slots have: the layers of both towers in a row, cut into slots."""
        return math.comb(sum(map(sum, (*self.vision, *self.language))) + self._num_slots - 1, self._num_slots - 1)

    def possible(self) -> Iterator["Lists"]:
        """All legal lists of the same layers and slots."""
        num_vision, num_language = (sum(map(sum, one)) for one in (self.vision, self.language))
        num_layers, num_stages = num_vision + num_language, len(next(iter(self.vision)))
        for ends in combinations_with_replacement(range(num_layers + 1), self._num_slots - 1):
            spans = list(pairwise((0, *ends, num_layers)))
            vision = [min(end, num_vision) - min(start, num_vision) for start, end in spans]
            language = [end - start - count for (start, end), count in zip(spans, vision, strict=True)]
            yield Lists(_nested(vision, num_stages), _nested(language, num_stages))

    @property
    def _num_slots(self) -> int:
        return sum(map(len, self.vision))

    @property
    def is_legal(self) -> bool:
        """Whether no LLM layer comes before the last ViT layer."""
        num_vision, num_language = (sum(map(sum, one)) for one in (self.vision, self.language))
        return not layout_problems(self.vision, self.language, num_vision, num_language)


@dataclass(frozen=True)
class Costs:
    """What the search asks about lists."""

    cost: Callable[[Lists], float]
    """What is to be least: the simulated step."""
    least: Callable[[Lists], float]
    """A quick lower bound of it."""
    unevenness: Callable[[Lists], float]
    """Quick: how unevenly the stages are loaded."""
    fits: Callable[[Lists], bool]


def best_lists(start: Lists, of: Costs) -> tuple[Lists, float]:
    """The lists of least cost, or if very many are possible those that no move of one layer improves; and their cost.

    In the latter case two descents: from ``start``, and from the lists that load the stages most evenly, which a
    descent along ``unevenness`` finds.  Lists that do not fit are never returned, except ``start``.
    """
    if start.num_possible <= MAX_COMPARED:
        return _compared(start, of)
    even = _evened(start, of)
    found = [_descended(one, of) for one in dict.fromkeys((start, even)) if one == start or of.fits(one)]
    return min(found, key=lambda one: one[1])


def _compared(start: Lists, of: Costs) -> tuple[Lists, float]:
    """Try all possible lists, in the order of their bounds, until the bound is above the best cost."""
    best, least = start, of.cost(start)
    for bound, _, one in sorted((of.least(one), one.order, one) for one in start.possible()):
        if bound >= least:
            break
        if of.fits(one) and (cost := of.cost(one)) < least * (1 - LEAST_GAIN):
            best, least = one, cost
    return best, least


def _evened(start: Lists, of: Costs) -> Lists:
    best, least = start, of.unevenness(start)
    while True:
        tried = ((of.unevenness(one), one.order, one) for one in best.moves())
        unevenness, _, found = min(tried, default=(least, best.order, best))
        if unevenness >= least:
            return best
        best, least = found, unevenness


def _descended(start: Lists, of: Costs) -> tuple[Lists, float]:
    """Take the best move until none helps: the most promising moves first, all of them before the descent ends."""
    best, least = start, of.cost(start)
    while True:
        near = sorted((of.least(one), one.order, one) for one in best.moves())
        near = [one for bound, _, one in near if bound < least]
        for tried in (near[:NUM_TRIED], near[NUM_TRIED:]):
            cost, _, found = min(((of.cost(one), one.order, one) for one in tried if of.fits(one)),
                                 default=(least, best.order, best))
            if cost < least * (1 - LEAST_GAIN):
                best, least = found, cost
                break
        else:
            return best, least


def _nested(counts: list[int], num_stages: int) -> PipelineLayout:
    return tuple(tuple(counts[first : first + num_stages]) for first in range(0, len(counts), num_stages))
