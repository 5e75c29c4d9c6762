"""Compares two sources of weights bit by bit, in Hugging Face order."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mm.formats.copy import Advance
from mm.formats.files import Files
from mm.formats.source import Source
from mm.formats.storage import Structure, stored_weights
from mm.progress import Progress
from mm.weights.cut import cut_dim
from mm.weights.plan import Stretch, ViewIndex
from mm.weights.table import Weight
from mm.weights.views import Misfit, Stored, View

COMPARED_BYTES = 1 << 20
"""Bytes of one tensor in one directory that each worker reads at a time."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Unequal:
    """How one Hugging Face tensor differs."""

    hf_weight: Weight
    """The tensor, as one of ``hf_weights``."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """In the source and the target."""
    num_different: int
    """Number of elements; for two dtypes, after rounding the finer to the coarser.  May be 0."""
    largest: float
    """Absolute difference; infinite if an element is infinite or NaN in only one directory."""
    at: tuple[int, int]
    """The first element that differs: its index along ``cut_dim``, and its flat index over the other dimensions."""

    @property
    def key(self) -> str:
        return self.hf_weight.hf_names[0]

    @property
    def index(self) -> tuple[int, ...]:
        """``at`` as an index into the tensor."""
        index, place = self.at
        if cut_dim(self.hf_weight):
            return place, index
        return index, *map(int, np.unravel_index(place, self.hf_weight.shape[1:]))


@dataclass
class Finding:
    """What is wrong with one weight."""

    weight: Weight
    unequal: list[Unequal] = field(default_factory=list)
    lacking: list[Weight] = field(default_factory=list)
    """The ``hf_weights`` that cannot be compared."""
    copies: list[tuple[Source, Stored, Stored]] = field(default_factory=list)
    """Tensors of one directory that should be equal, but are not."""
    padding: dict[Stored, Source] = field(default_factory=dict)
    """Stored tensors with padding that is not zero."""
    misfits: list[tuple[Source, Misfit]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.unequal or self.lacking or self.copies or self.padding or self.misfits)


def compare(weights: Sequence[Weight], source: Source, target: Source, num_workers: int) -> list[Finding]:
    """A finding for each of ``weights``, in order; most are empty."""
    sides = [(source, _checks(source)), (target, _checks(target))]
    total = sum(math.prod(weight.shape) for weight in weights)
    with Progress("comparing", total, "elements") as bar, ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(lambda weight: _compare_weight(weight, sides, bar.update), weights))


def hf_weights(weight: Weight) -> tuple[Weight, ...]:
    """The Hugging Face tensors of ``weight``, each as a separate weight with one name and shape."""
    return stored_weights(weight, Structure.CANONICAL)


_Checks = dict[str, list[tuple[View, View] | Stretch | Misfit]]


def _checks(source: Source) -> _Checks:
    """Copies, padding and misfits, by the first Hugging Face tensor of their stored weight."""
    found: _Checks = {}
    for weight, check in (
        *((copies[0].weight, copies) for copies in source.index.copies),
        *((padding.view.weight, padding) for padding in source.index.padding),
        *((misfit.weight, misfit) for misfit in source.problems),
    ):
        if weight is not None:
            found.setdefault(weight.hf_names[0], []).append(check)
    return found


def held_dtype(source: Source, hf_weight: Weight) -> torch.dtype | None:
    """The dtype in which ``source`` holds one of ``hf_weights``; None if incomplete, or held in two dtypes."""
    stretches, dim, shape = source.index.stretches(hf_weight.hf_names[0]), cut_dim(hf_weight), hf_weight.shape
    dtypes = {one.view.stored.dtype for one in stretches}
    fits = all(one.view.stored.shape[:dim] + one.view.stored.shape[dim + 1 :] == shape[:dim] + shape[dim + 1 :]
               for one in stretches)
    is_whole = fits and sum(one.span.length for one in stretches) == shape[dim]
    return dtypes.pop() if is_whole and len(dtypes) == 1 else None


def _compare_weight(weight: Weight, sides: Sequence[tuple[Source, _Checks]], progress: Advance) -> Finding:
    finding, (source, target) = Finding(weight), (side for side, _ in sides)
    with Files(source.path) as left, Files(target.path) as right:
        for hf_weight in hf_weights(weight):
            one, other = held_dtype(source, hf_weight), held_dtype(target, hf_weight)
            if one is None or other is None:
                finding.lacking.append(hf_weight)
                continue
            unequal = _compare_tensor(hf_weight, (one, other), ((source, left), (target, right)), progress)
            if unequal.num_different or one != other:
                finding.unequal.append(unequal)
        for (side, checks), files in zip(sides, (left, right), strict=True):
            for check in (check for key in weight.hf_names for check in checks.get(key, ())):
                match check:
                    case Misfit():
                        finding.misfits.append((side, check))
                    case Stretch(view) if not files.is_zero(check):
                        finding.padding[view.stored] = side
                    case (kept, copy) if not files.are_equal(kept.stored, copy.stored):
                        finding.copies.append((side, kept.stored, copy.stored))
    return finding


def _compare_tensor(
    hf_weight: Weight,
    dtypes: tuple[torch.dtype, torch.dtype],
    sides: Sequence[tuple[Source, Files]],
    progress: Advance,
) -> Unequal:
    num_different, largest, at, dtype, key = 0, 0.0, (0, 0), coarser(dtypes), hf_weight.hf_names[0]
    view = sides[0][0].index.stretches(key)[0].view
    for rows, indices in view.blocks(range(hf_weight.shape[view.dim]), COMPARED_BYTES):
        left, right = (files.block(side.index, key, rows, indices) for side, files in sides)
        progress(left.numel())
        if same(left.to(dtype), right.to(dtype)):
            continue
        left_bits, right_bits = bits(left.to(dtype)), bits(right.to(dtype))
        unlike = left_bits != right_bits
        amounts = (_wide(left) - _wide(right))[unlike].abs().nan_to_num(nan=math.inf, posinf=math.inf)
        if not num_different:
            row, index, place = tuple(unlike.nonzero()[0].tolist())
            at = indices.start + index, rows.start + row + place  # either row or place is 0
        num_different, largest = num_different + len(amounts), max(largest, amounts.max().item())
    return Unequal(hf_weight, dtypes, num_different, largest, at)


def is_right(view: View, found: Source, expected: Source) -> bool:
    """Whether dtype and every bit of a stored tensor, including padding, match ``expected``."""
    alone = ViewIndex((view,))
    with Files(found.path) as files, Files(expected.path) as others:
        return all(map(files.is_zero, alone.padding)) and all(
            same(files.block(alone, span.key, rows, indices), others.block(expected.index, span.key, rows, indices))
            for span in view.spans if span.key is not None
            for rows, indices in view.blocks(range(span.start, span.stop), COMPARED_BYTES)
        )


def same(one: Tensor, other: Tensor) -> bool:
    """Whether dtype, shape and every bit are equal."""
    return one.dtype == other.dtype and np.array_equal(bits(one).numpy(), bits(other).numpy())


def bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers, so that comparisons are bitwise."""
    return tensor.contiguous().view(_INTEGERS[tensor.dtype.itemsize])


def coarser(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype with the larger rounding errors."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32 if tensor.dtype.itemsize == 2 else torch.float64)
