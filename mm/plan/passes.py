"""How long the passes of a replica's step take, by kind of block, and the pipeline that follows from that.

``mm.plan.predict`` adds up all blocks of a slot; comparisons with a measured step need them separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mm.batch import NO_SAMPLES
from mm.model.flops import BlockPlace, blocks
from mm.parallel.simulation import MessageCost, TimedStep, as_costs, as_messages, simulate
from mm.placement import Placement
from mm.plan.costs import image_kinds
from mm.plan.predict import Predictor
from mm.weights.table import VISION_PLACES, Place

FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True)
class Kinds:
    """The kinds of blocks of a model, in the order of the forward pass."""

    names: tuple[str, ...]
    is_vision: tuple[bool, ...]
    by_place: dict[BlockPlace, int]

    @classmethod
    def of(cls, predictor: Predictor) -> "Kinds":
        """The kinds of the predictor's model."""
        places: dict[str, Place] = {}
        found = blocks(predictor.run.model, NO_SAMPLES)
        for block in found:
            places.setdefault(block.kind, block.place)
        names = list(places)
        return cls(tuple(names), tuple(place in VISION_PLACES for place in places.values()),
                   {(block.place, block.layer): names.index(block.kind) for block in found})


@dataclass(frozen=True)
class Passes:
    """The passes of one replica in one step.  Microbatches are in the order in which they enter the pipeline."""

    placement: Placement
    of_kinds: np.ndarray
    """Seconds of the blocks of each kind [direction, microbatch, slot, kind]."""
    is_passed: np.ndarray
    """bool [direction, microbatch, slot]: whether the slot has such a pass."""
    inside: float
    """The host's seconds per pass besides its blocks, while the pass is recorded."""
    between: float
    """The host's seconds after each pass, which are not recorded."""
    messages: Sequence[Sequence[MessageCost]]

    @classmethod
    def of(cls, predictor: Predictor, kinds: Kinds, counts: np.ndarray) -> "Passes":
        """The passes of the microbatches ``counts`` [num_microbatches, num_counts]."""
        placement, costs, here = predictor.run.model.placement(), predictor.costs, predictor.shared(counts)
        is_in = costs.slots_of([placement])
        is_of = np.zeros((len(kinds.by_place), len(kinds.names)))
        for number, place in enumerate(costs.places):
            is_of[number, kinds.by_place[place]] = 1
        inside = predictor.calibration.chunk_pass
        of_blocks = predictor.of_blocks(counts, placement)
        return cls(placement, np.einsum("dmb,bs,bk->dmsk", of_blocks, is_in[..., 0], is_of, optimize=True),
                   costs.is_passed(is_in)[..., 0][:, image_kinds(here)], inside, costs.chunk_pass - inside,
                   as_messages(predictor.messages(here, [placement])[..., 0]))

    def recorded(self, factors: np.ndarray | None = None) -> np.ndarray:
        """The recorded seconds of each pass [direction, microbatch, slot], with the seconds of blocks multiplied by
        ``factors`` [direction, kind]."""
        of_blocks = self.of_kinds.sum(axis=-1) if factors is None else np.einsum("dmsk,dk->dms", self.of_kinds, factors)
        return of_blocks + self.inside * self.is_passed

    def timeline(self, recorded: np.ndarray, between: Sequence[float]) -> list[list[TimedStep]]:
        """What each stage does and when, if passes take the seconds ``recorded``, and the host of each stage takes
        ``between`` after every pass."""
        num_slots, num_stages = len(self.placement.slots), self.placement.num_stages
        after = np.array([between[slot % num_stages] for slot in range(num_slots)])
        costs = as_costs((recorded + after) * self.is_passed)
        return simulate(costs, num_stages, self.messages)

    @property
    def num_passes(self) -> np.ndarray:
        """The number of passes of each stage."""
        return self.is_passed.sum(axis=(0, 1)).reshape(-1, self.placement.num_stages).sum(axis=0)
