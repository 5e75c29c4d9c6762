"""From the measured times of slots to those of single blocks: a block is what one slot has beyond another.

The slots are measured in rounds.  Only times of one round are subtracted from each other, and the median of the rounds
counts, so a machine that is slow for some seconds changes little.  Pure arithmetic; it does not know how slots are
measured.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from mm.model.flops import BlockPlace
from mm.plan.laws import Law, Timed, fitted, relative_errors
from mm.weights.table import Place

VISION = (1, 1, 3, 1, 1, 0, 0, 0, 0)
"""ViT layers of each slot of a probe."""
LANGUAGE = (0, 0, 0, 0, 0, 1, 1, 3, 1)
"""LLM layers of each slot of a probe."""
FULL_LAYER = 5
"""The ViT layer with full attention, alone in its slot."""
_FULL_SLOT = 3

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Difference:
    """A block is what the slot ``more`` has beyond the slot ``less``, divided by ``count``."""

    place: BlockPlace
    more: int
    less: int | None
    """None: beyond the host's work for a pass."""
    count: int = 1


LAYERS = (Difference((Place.VISION_LAYER, 1), 2, 1, 2), Difference((Place.LANGUAGE_LAYER, 1), 7, 6, 2))
DIFFERENCES = (
    *LAYERS, Difference((Place.PATCH_EMBEDDING, None), 0, 1),
    Difference((Place.VISION_LAYER, FULL_LAYER), _FULL_SLOT, None), Difference((Place.PROJECTOR, None), 4, 1),
    Difference((Place.EMBEDDING, None), 5, 6), Difference((Place.HEAD, None), 8, 6),
)  # fmt: skip


@dataclass(frozen=True)
class SlotTimes:
    """Seconds of one slot for each microbatch that was measured, by the microbatch's number."""

    forward: Mapping[int, float]
    backward: Mapping[int, float]

    def of(self, direction: Direction) -> Mapping[int, float]:
        return self.forward if direction == "forward" else self.backward


Round = Mapping[int, SlotTimes]
"""The slots that one round measured, by their number."""


def slots_of(differences: Iterable[Difference]) -> list[int]:
    """The slots that must be measured."""
    return sorted({slot for one in differences for slot in (one.more, one.less) if slot is not None})


def block_seconds(
    rounds: Sequence[Round], one: Difference, direction: Direction, chunk_pass: float
) -> dict[int, list[float]]:
    """Seconds of the block in each round, by microbatch.  ``chunk_pass``: the host's seconds for a pass."""
    found: dict[int, list[float]] = {}
    for slots in rounds:
        less: Mapping[int, float] = {} if one.less is None else slots[one.less].of(direction)
        for number, seconds in slots[one.more].of(direction).items():
            other = less.get(number, chunk_pass if one.less is None else 0.0)
            found.setdefault(number, []).append((seconds - other) / one.count)
    return found


def pass_seconds(rounds: Sequence[Round], differences: Collection[Difference]) -> list[float]:
    """The host's seconds for passes: how much longer a slot of one layer takes than a layer.

    One value for each kind of layer in ``differences``, direction and microbatch.
    """
    found = list[float]()
    for one in (one for one in LAYERS if one in differences):
        for direction in DIRECTIONS:
            for number, layer in block_seconds(rounds, one, direction, 0.0).items():
                assert one.less is not None, "a slot of one layer"
                alone = median(slots[one.less].of(direction)[number] for slots in rounds)
                if median(layer) > 0:
                    found.append(alone - median(layer))
    return found


def usual_pass(passes: Sequence[float]) -> float:
    """The host's seconds for a pass, from all ``pass_seconds``; 0 if these are lost in noise."""
    return max(0.0, median(passes)) if passes else 0.0


def law_and_error(seconds: Mapping[int, Sequence[float]], sizes: Mapping[int, tuple[int, int]]) -> tuple[Law, float]:
    """The law of a block in one direction, and its relative error.

    ``seconds``: of each round, by microbatch; ``sizes``: the block's rows and pairs by microbatch.  The error is the
    root of two squares: the law's largest misfit, and half the range of the rounds (the median of the microbatches).
    """
    usual = {number: middle for number, rounds in seconds.items() if (middle := median(rounds)) > 0}
    times = [Timed(*sizes[number], middle) for number, middle in usual.items()]
    if len(times) < 2:
        return Law(0.0, 0.0), 0.0
    law = fitted(times)
    misfit = max(map(abs, relative_errors(law, times)))
    spread = median((max(seconds[number]) - min(seconds[number])) / 2 / middle for number, middle in usual.items())
    return law, math.hypot(misfit, spread)
