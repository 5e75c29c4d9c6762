"""Compares two sources of weights to the last bit, in Hugging Face order: what differs, not why."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from checkpoint.formats.copy import Progress
from checkpoint.formats.files import Files
from checkpoint.formats.source import Source
from mm.weights.cut import cut_dim
from mm.weights.plan import Stretch
from mm.weights.table import Weight
from mm.weights.views import Misfit, Stored, View

_BLOCK_ELEMENTS = 1 << 19
"""How much of one tensor in one directory is read at a time by each worker."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Unequal:
    """How one Hugging Face tensor differs."""

    key: str
    shape: tuple[int, ...]
    dim: int
    """The dimension that is cut: 0, or 1 of a matrix."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """In the source and the target."""
    num_different: int
    """Elements; with two dtypes, those that differ after the finer one is rounded to the coarser.  May be 0."""
    largest: float
    """Absolute difference; infinite when an element is infinite or no number in one directory only."""
    at: tuple[int, int]
    """The first element that differs: its index along ``dim``, and its place in the other dimensions together."""
    num_bits: int
    """Differing bits of that element."""

    @property
    def index(self) -> tuple[int, ...]:
        """Where ``at`` is in the tensor."""
        index, place = self.at
        return (place, index) if self.dim else (index, *map(int, np.unravel_index(place, self.shape[1:])))


@dataclass
class Finding:
    """What is wrong with one weight."""

    weight: Weight
    unequal: list[Unequal] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    """Hugging Face tensors that cannot be compared."""
    copies: list[tuple[Source, Stored, Stored]] = field(default_factory=list)
    """Tensors of one directory that should be equal."""
    padding: dict[Stored, Source] = field(default_factory=dict)
    """Stored tensors with padding that is not zero."""
    misfits: list[tuple[Source, Misfit]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.unequal or self.lacking or self.copies or self.padding or self.misfits)


def compare(weights: Sequence[Weight], source: Source, target: Source, num_workers: int) -> list[Finding]:
    """A finding for each of ``weights``, in their order; most are empty."""
    sides = [(source, _checks(source)), (target, _checks(target))]
    total = sum(math.prod(weight.shape) for weight in weights)
    progress = tqdm(total=total, unit=" elements", unit_scale=True, disable=None)
    with progress as bar, ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(lambda weight: _compare_weight(weight, sides, bar.update), weights))


_Checks = dict[str, list[tuple[View, View] | Stretch | Misfit]]


def _checks(source: Source) -> _Checks:
    """Copies, padding and misfits, by the first Hugging Face tensor of each weight.

    A weight itself would be no key, because files may keep q, k and v as three weights.
    """
    found: _Checks = {}
    for copies in source.index.copies:
        found.setdefault(copies[0].weight.hf_names[0], []).append(copies)
    for padding in source.index.padding:
        found.setdefault(padding.view.weight.hf_names[0], []).append(padding)
    for misfit in source.problems:
        if misfit.weight is not None:
            found.setdefault(misfit.weight.hf_names[0], []).append(misfit)
    return found


def tensors(weight: Weight, *sides: Source) -> Iterator[tuple[str, tuple[int, ...], list[torch.dtype | None]]]:
    """Each Hugging Face tensor of ``weight``, its shape, and the dtype in which each side holds it."""
    for key, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
        yield key, shape, [held_dtype(side, key, shape, cut_dim(weight)) for side in sides]


def held_dtype(source: Source, key: str, shape: tuple[int, ...], dim: int) -> torch.dtype | None:
    """The dtype in which ``source`` holds the Hugging Face tensor ``key``; None if not in whole, or in two dtypes."""
    parts = source.index.stretches(key)
    dtypes = {part.view.stored.dtype for part in parts}
    fits = all(one[:dim] + one[dim + 1 :] == shape[:dim] + shape[dim + 1 :]
               for one in (part.view.stored.shape for part in parts))
    is_whole = fits and sum(part.span.length for part in parts) == shape[dim]
    return dtypes.pop() if is_whole and len(dtypes) == 1 else None


def _compare_weight(weight: Weight, sides: Sequence[tuple[Source, _Checks]], progress: Progress) -> Finding:
    finding, (source, target) = Finding(weight), (side for side, _ in sides)
    with Files(source.path) as left, Files(target.path) as right:
        for key, shape, (one, other) in tensors(weight, source, target):
            if one is None or other is None:
                finding.lacking.append(key)
                continue
            files = (source, left), (target, right)
            unequal = _compare_tensor(key, shape, cut_dim(weight), (one, other), files, progress)
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
    key: str,
    shape: tuple[int, ...],
    dim: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    sides: Sequence[tuple[Source, Files]],
    progress: Progress,
) -> Unequal:
    num_different, largest, at, num_bits, dtype = 0, 0.0, (0, 0), 0, coarser(dtypes)
    for rows, indices in _blocks(shape, dim):
        left, right = (side.read_block(files, key, rows, indices) for side, files in sides)
        progress(left.numel())
        left_bits, right_bits = bits(left.to(dtype)), bits(right.to(dtype))
        if np.array_equal(left_bits.numpy(), right_bits.numpy()):
            continue
        unlike = left_bits != right_bits
        amounts = (_wide(left) - _wide(right))[unlike].abs().nan_to_num(nan=math.inf, posinf=math.inf)
        if not num_different:
            row, index, place = first = tuple(unlike.nonzero()[0].tolist())
            at = indices.start + index, rows.start + row + place  # one of row and place is always 0
            num_bits = (int(left_bits[first] ^ right_bits[first]) & ((1 << 8 * dtype.itemsize) - 1)).bit_count()
        num_different, largest = num_different + len(amounts), max(largest, amounts.max().item())
    return Unequal(key, shape, dim, dtypes, num_different, largest, at, num_bits)


def _blocks(shape: tuple[int, ...], dim: int) -> Iterator[tuple[range, range]]:
    """(rows, indices) for ``Source.read_block`` that cover a tensor in small blocks."""
    rows, indices = range(math.prod(shape[:dim])), range(shape[dim])
    if dim:
        yield from ((part, indices) for part in _split(rows, len(indices)))
    else:
        yield from ((rows, part) for part in _split(indices, math.prod(shape[1:])))


def _split(whole: range, num_elements: int) -> Iterator[range]:
    """``whole`` in blocks; each of its numbers stands for ``num_elements``."""
    step = max(1, _BLOCK_ELEMENTS // num_elements)
    return (whole[start : start + step] for start in range(0, len(whole), step))


def sample(source: Source, key: str, dim: int, indices: range, places: range) -> Tensor:
    """[index, place] of a Hugging Face tensor: indices along ``dim``, places in the other dimensions."""
    with Files(source.path) as files:
        if dim:
            return source.read_block(files, key, places, indices)[:, :, 0].T
        width = math.prod(source.index.stretches(key)[0].view.stored.shape[1:])
        blocks = (source.read_block(files, key, range(1), part)[0] for part in _split(indices, width))
        return torch.cat([block[:, places.start : places.stop].clone() for block in blocks])


def bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers, so that equal means equal in every bit."""
    return tensor.contiguous().view(_INTEGERS[tensor.dtype.itemsize])


def coarser(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype with the larger rounding errors."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32 if tensor.dtype.itemsize == 2 else torch.float64)
