"""Units: weights that are gathered, and whose gradients are reduced, by one collective; and how they lie in memory."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

_ALIGNED_ELEMENTS = 64
"""In its bucket a weight starts at a multiple of this many elements, and the size of a bucket is a multiple of
_BUCKET_ELEMENTS, as in megatron's ``_ParamAndGradBuffer``: 128 and 256 bytes of bf16, for cuBLAS."""
_BUCKET_ELEMENTS = 128

TowerName = Literal["vision", "projector", "language"]
BucketPlaces = dict[Any, tuple[int, int]]
"""Where each weight begins and ends in its bucket, in order."""


@dataclass(frozen=True)
class Unit:
    """Weights that belong together: those of a layer, of the projector, of the word embedding."""

    modules: tuple[nn.Module, ...]
    """The modules that use them, in the order of the forward pass.  A later one may own none: a tied output layer."""
    tower: TowerName = "language"
    """Units of the ViT and the projector are used only by microbatches with images."""
    is_table: bool = False
    """Whether the first module only looks up rows of its weight, so that its backward pass does not read the weight."""

    @property
    def is_vision(self) -> bool:
        return self.tower != "language"


@dataclass(frozen=True)
class BucketLayout:
    """How weights lie in a bucket, which is divided evenly among the ranks that hold the same weights."""

    places: BucketPlaces
    num_elements: int
    """With padding."""
    stop: int
    """The end of the last weight."""

    @classmethod
    def of(cls, weights: Iterable[Any], num_ranks: int) -> "BucketLayout":
        places, stop = BucketPlaces(), 0
        for weight in weights:
            start = padded(stop, _ALIGNED_ELEMENTS)
            places[weight] = start, (stop := start + weight.numel())
        return cls(places, padded(stop, math.lcm(num_ranks, _BUCKET_ELEMENTS)), stop)


def padded(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


def owned_weights(units: Sequence[Unit], weights: Iterable[Any]) -> list[list[Any]]:
    """For each unit those of ``weights`` that it owns, in the order of its modules.  A weight that two units use
    belongs to the first."""
    left, found = dict.fromkeys(weights), list[list[Any]]()
    for unit in units:
        own = [weight for module in unit.modules for weight in module.parameters() if weight in left]
        found.append([*dict.fromkeys(own)])
        for weight in found[-1]:
            del left[weight]
    assert not left, "every weight is in a unit"
    return found
