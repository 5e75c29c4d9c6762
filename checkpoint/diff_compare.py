"""Compares two directories byte by byte, one weight at a time, with small buffers whatever the size of the model."""

import math
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint.diff_causes import bits, precision_order
from checkpoint.diff_sides import Held, Side, blocks
from checkpoint.formats.copy import Files, Progress
from mm.weights.plan import Index
from mm.weights.table import Weight
from mm.weights.views import Stored, View


@dataclass(frozen=True)
class Position:
    """Of an element of a published tensor."""

    row: int
    """Along the dimensions before the one that is cut."""
    index: int
    place: int
    """Along the dimensions after it, flat."""


@dataclass(frozen=True)
class Unequal:
    """How one published tensor differs."""

    key: str
    source: Held
    target: Held
    num_elements: int
    num_different: int
    """With two dtypes, those that differ after the finer one is rounded to the coarser; may be 0."""
    largest: float
    """Absolute difference; infinite when an element is infinite or no number in one directory only."""
    first: Position | None
    """None when no element differs."""
    num_bits: int
    """That differ in the first differing element."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with one weight; empty when all is equal."""

    weight: Weight
    unequal: tuple[Unequal, ...] = ()
    unlike_copies: tuple[tuple[Side, Stored, Stored], ...] = ()
    """Of one directory, that should be equal."""
    padding: tuple[tuple[Side, Stored], ...] = ()
    """That is not zero."""

    @property
    def is_empty(self) -> bool:
        return not (self.unequal or self.unlike_copies or self.padding)


def compare_weight(weight: Weight, source: Side, target: Side, progress: Progress) -> Finding:
    """Every element of ``weight`` that both directories hold, and the copies and the padding of each."""
    unequal, copies, padding = [], [], []
    with closing(Files(source.path)) as left, closing(Files(target.path)) as right:
        for key, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
            held, other = source.held(key, shape), target.held(key, shape)
            if held is not None and other is not None:
                found = _compare_tensor(key, (left, held), (right, other), progress)
                unequal += [] if found is None else [found]
        for side, files in ((source, left), (target, right)):
            copies += [(side, one.stored, other.stored) for one, other in side.twins_of(weight)
                       if not _are_equal(files, one, other)]
            padding += [(side, view.stored) for view in side.views_of(weight)
                        if not all(files.is_zero(part) for part in Index([view]).padding)]
    return Finding(weight, tuple(unequal), tuple(copies), tuple(padding))


@dataclass
class _Tally:
    """Of the blocks that were compared."""

    num_different: int = 0
    largest: float = 0.0
    first: int | None = None
    """Flat number of the first differing element of its block."""
    num_bits: int = 0

    def add(self, one: Tensor, other: Tensor) -> bool:
        """Whether the first difference of all is in this block; ``one`` and ``other`` are flat and of any dtype."""
        if one.dtype == other.dtype and torch.equal(bits(one), bits(other)):
            return False
        values = _wide(one), _wide(other)
        if one.dtype != other.dtype:
            coarser, _ = precision_order((one.dtype, other.dtype))
            one, other = one.to(coarser), other.to(coarser)
        unlike = bits(one) != bits(other)
        places = unlike.nonzero().flatten()
        if not len(places):
            return False
        self.num_different += len(places)
        amounts = (values[0] - values[1])[places].abs()
        self.largest = max(self.largest, amounts.nan_to_num(nan=math.inf, posinf=math.inf).max().item())
        if self.first is not None:
            return False
        self.first = int(places[0])
        flipped = bits(one)[self.first] ^ bits(other)[self.first]
        self.num_bits = (int(flipped) & ((1 << 8 * one.dtype.itemsize) - 1)).bit_count()
        return True


def _compare_tensor(
    key: str, source: tuple[Files, Held], target: tuple[Files, Held], progress: Progress
) -> Unequal | None:
    """None when every bit is equal."""
    (left, held), (right, other) = source, target
    tally, first = _Tally(), None
    unit = held.unit_bytes // held.dtype.itemsize
    num_elements = held.num_rows * held.num_indices * unit
    if held.dtype != other.dtype and not (held.dtype.is_floating_point and other.dtype.is_floating_point):
        return Unequal(key, held, other, num_elements, num_elements, math.inf, None, 0)
    for rows, indices in blocks(held, other):
        one, another = held.read(left, rows, indices), other.read(right, rows, indices)
        if tally.add(one, another):
            row, rest = divmod(tally.first, len(indices) * unit)
            first = Position(rows.start + row, indices.start + rest // unit, rest % unit)
        progress(len(rows) * len(indices) * held.unit_bytes)
    if tally.num_different == 0 and held.dtype == other.dtype:
        return None
    return Unequal(key, held, other, num_elements, tally.num_different, tally.largest, first, tally.num_bits)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32 if tensor.dtype.itemsize == 2 else torch.float64)


def _are_equal(files: Files, one: View, other: View) -> bool:
    same = (one.stored.dtype, one.stored.shape) == (other.stored.dtype, other.stored.shape)
    return same and files.are_equal(one.stored, other.stored)
