"""Compares two sources of weights to the last bit, in Hugging Face order: what differs, not why."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from checkpoint.formats.copy import Files, Progress
from checkpoint.formats.source import Source
from mm.weights.cut import cut_dim
from mm.weights.plan import Padding
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
    num_different: int = 0
    """Elements; with two dtypes, those that differ after the finer one is rounded to the coarser.  May be 0."""
    largest: float = 0.0
    """Absolute difference; infinite when an element is infinite or no number in one directory only."""
    first: int | None = None
    """Flat position of the first differing element; None when none differs."""
    num_bits: int = 0
    """Differing bits of that element."""

    @property
    def index(self) -> tuple[int, ...]:
        """The position of the first differing element."""
        return tuple(int(index) for index in np.unravel_index(self.first, self.shape))

    @property
    def place(self) -> int:
        """The position of the first differing element in the dimensions that are not cut."""
        return self.index[0] if self.dim else self.first % math.prod(self.shape[1:])


@dataclass(frozen=True)
class Finding:
    """What is wrong with one weight."""

    weight: Weight
    unequal: tuple[Unequal, ...]
    lacking: tuple[str, ...]
    """Hugging Face tensors that cannot be compared."""
    copies: tuple[tuple[Source, Stored, Stored], ...]
    """Tensors of one directory that should be equal."""
    padding: tuple[tuple[Source, Stored], ...]
    """Stored tensors with padding that is not zero."""
    misfits: tuple[tuple[Source, Source, Misfit], ...]
    """Each with its own directory and the other one."""

    @property
    def is_empty(self) -> bool:
        return not (self.unequal or self.lacking or self.copies or self.padding or self.misfits)


class _Checks:
    """What there is to check in one directory besides the values, by Hugging Face tensor."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._found: dict[str, list[tuple[View, View] | Padding | Misfit]] = {}
        # By the first tensor, because files may keep q, k and v as three weights.
        for weight, one in (
            *((one.weight, (one, other)) for one, other in source.index.copies),
            *((padding.view.weight, padding) for padding in source.index.padding),
            *((misfit.weight, misfit) for misfit in source.problems),
        ):
            if weight is not None:
                self._found.setdefault(weight.hf_names[0], []).append(one)

    def run(
        self, weight: Weight, files: Files
    ) -> tuple[list[tuple[Source, Stored, Stored]], list[tuple[Source, Stored]], list[Misfit]]:
        """Unequal copies, stored tensors whose padding is not zero, and misfits."""
        copies, padding, misfits = [], {}, []
        for one in (one for key in weight.hf_names for one in self._found.get(key, ())):
            match one:
                case Misfit():
                    misfits.append(one)
                case Padding(view) if not files.is_zero(one):
                    padding[view.stored] = None
                case (kept, copy) if not files.are_equal(kept.stored, copy.stored):
                    copies.append((self.source, kept.stored, copy.stored))
        return copies, [(self.source, stored) for stored in padding], misfits


def compare(weights: Sequence[Weight], source: Source, target: Source, num_workers: int) -> list[Finding]:
    """Every element that both hold, and the copies and the padding of each; a finding for every weight."""
    sides = _Checks(source), _Checks(target)
    total = sum(math.prod(shape) * dtypes[0].itemsize for weight in weights
                for _, shape, dtypes in tensors(weight, source, target) if None not in dtypes)
    with (tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar,
          ThreadPoolExecutor(num_workers) as pool):
        futures = [pool.submit(_compare_weight, weight, sides, bar.update) for weight in weights]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def tensors(weight: Weight, *sides: Source) -> Iterator[tuple[str, tuple[int, ...], list[torch.dtype | None]]]:
    """Each Hugging Face tensor of ``weight`` with its shape, and the dtype in which each side holds it."""
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


def _compare_weight(weight: Weight, sides: tuple[_Checks, _Checks], progress: Progress) -> Finding:
    source, target = (side.source for side in sides)
    unequal, lacking, copies, padding, misfits = [], [], [], [], []
    with Files(source.path) as left, Files(target.path) as right:
        for key, shape, dtypes in tensors(weight, source, target):
            if None in dtypes:
                lacking.append(key)
            else:
                one = Unequal(key, shape, cut_dim(weight), tuple(dtypes))
                unequal += _compare_tensor(one, ((source, left), (target, right)), progress)
        for side, other, files in ((sides[0], target, left), (sides[1], source, right)):
            found = side.run(weight, files)
            copies, padding = copies + found[0], padding + found[1]
            misfits += [(side.source, other, misfit) for misfit in found[2]]
    return Finding(weight, *map(tuple, (unequal, lacking, copies, padding, misfits)))


def _compare_tensor(one: Unequal, sides: Sequence[tuple[Source, Files]], progress: Progress) -> list[Unequal]:
    """``one`` with what was found; empty when every bit is equal."""
    num_different, largest, first, num_bits = 0, 0.0, None, 0
    num_indices, unit, dtype = one.shape[one.dim], math.prod(one.shape[one.dim + 1 :]), coarser(one.dtypes)
    for rows, indices in _blocks(one.shape, one.dim):
        left, right = (side.read_block(files, one.key, rows, indices) for side, files in sides)
        progress(left.nbytes)
        left_bits, right_bits = bits(left.to(dtype)), bits(right.to(dtype))
        if np.array_equal(left_bits.numpy(), right_bits.numpy()):
            continue
        unlike = left_bits != right_bits
        amounts = (_wide(left) - _wide(right))[unlike].abs().nan_to_num(nan=math.inf, posinf=math.inf)
        num_different, largest = num_different + len(amounts), max(largest, amounts.max().item())
        if first is None:
            at = tuple(unlike.nonzero()[0].tolist())
            first = ((rows.start + at[0]) * num_indices + indices.start + at[1]) * unit + at[2]
            flipped = int(left_bits[at] ^ right_bits[at]) & ((1 << 8 * dtype.itemsize) - 1)
            num_bits = flipped.bit_count()
    if not num_different and one.dtypes[0] == one.dtypes[1]:
        return []
    return [replace(one, num_different=num_different, largest=largest, first=first, num_bits=num_bits)]


def _blocks(shape: tuple[int, ...], dim: int) -> Iterator[tuple[range, range]]:
    """(rows, indices) for ``Source.read_block`` that cover a tensor in small blocks."""
    rows, indices, unit = math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])
    step = max(1, _BLOCK_ELEMENTS // (indices if dim else unit))
    for start in range(0, rows if dim else indices, step):
        part = range(start, min(start + step, rows if dim else indices))
        yield (part, range(indices)) if dim else (range(1), part)


def sample(
    source: Source, key: str, shape: tuple[int, ...], dim: int, places: range, indices: range | None = None
) -> Tensor:
    """[index along ``dim``, place]: all or some ``indices`` of a Hugging Face tensor, at some places of each."""
    with Files(source.path) as files:
        if dim:
            return source.read_block(files, key, places, indices or range(shape[dim]))[:, :, 0].T
        found = []
        for rows, block in _blocks(shape, dim):
            wanted = block if indices is None else range(max(block.start, indices.start), min(block.stop, indices.stop))
            if wanted:
                content = source.read_block(files, key, rows, wanted)
                found.append(content[0, :, places.start : places.stop].clone())
        return torch.cat(found)


def bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers, so that equal means equal in every bit."""
    return tensor.contiguous().view(_INTEGERS[tensor.dtype.itemsize])


def coarser(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype with the larger rounding errors."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32 if tensor.dtype.itemsize == 2 else torch.float64)
