"""The two directories of ``diff``: opened however little they fit, and read tensor by tensor of the model.

Unlike in ``formats.source``, a tensor that is missing, left over or of another shape is a finding here, not the end.
Knows nothing of what makes two tensors differ.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from checkpoint.formats.copy import Files
from checkpoint.formats.hf import HFDirectory
from checkpoint.formats.known_models import recognize
from checkpoint.formats.mindspeed import MindSpeedDirectory
from checkpoint.formats.source import Kind, find_kind
from checkpoint.formats.source import open as open_source
from mm.config.model import ModelConfig
from mm.errors import UserError
from mm.weights.cut import Run
from mm.weights.table import Weight
from mm.weights.views import Stored, View

BUFFER_BYTES = 1 << 20
"""Of one tensor in one directory, at a time and for each worker."""
_BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Misfit:
    """A weight that a directory does not hold as it should."""

    weight: Weight
    tp_rank: int
    text: str
    """Names the file."""
    stored: Stored | None = None
    """What is there in another shape."""


@dataclass(frozen=True)
class Placed:
    """A view, and what it is a part of: its runs do not tell where there is nothing but padding."""

    weight: Weight
    view: View


@dataclass(frozen=True)
class Part:
    """A run of one tensor of the model in a stored tensor, from its index ``position`` on."""

    view: View
    position: int
    run: Run


@dataclass(frozen=True)
class Held:
    """One published tensor as one directory holds it, complete and each index once."""

    parts: tuple[Part, ...]
    """In the order of the tensor's indices along ``dim``."""
    num_rows: int
    num_indices: int
    unit_bytes: int

    @property
    def dim(self) -> int:
        return self.parts[0].view.dim

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].view.stored.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.num_indices * self.unit_bytes

    def part_of(self, index: int) -> Part:
        """Where an index along ``dim`` lies."""
        return next(part for part in self.parts if part.run.start <= index < part.run.start + part.run.length)

    def read(self, files: Files, rows: range, indices: range) -> Tensor:
        """The elements of some rows and indices, flat."""
        found = np.empty((len(rows), len(indices) * self.unit_bytes), np.uint8)
        for part in self.parts:
            start, stop = max(indices.start, part.run.start), min(indices.stop, part.run.start + part.run.length)
            if start >= stop:
                continue
            stored, unit = part.view.stored, self.unit_bytes
            first, num_bytes = (part.position + start - part.run.start) * unit, (stop - start) * unit
            into = found[:, (start - indices.start) * unit :][:, :num_bytes]
            if self.dim == 0:
                files.read(stored, first, memoryview(into.reshape(-1)))
            else:
                width = stored.num_bytes // self.num_rows
                block = np.empty((len(rows), width), np.uint8)
                files.read(stored, rows.start * width, memoryview(block.reshape(-1)))
                into[:] = block[:, first : first + num_bytes]
        return torch.from_numpy(found.reshape(-1)).view(self.dtype)

    @property
    def num_places(self) -> int:
        """Of one index, in the other dimensions."""
        return self.num_rows if self.dim else self.unit_bytes // self.dtype.itemsize

    def sample(self, root: Path, window: range, indices: range) -> Tensor:
        """[one of ``indices`` along ``dim``, place in ``window``]; see ``sample``."""
        found = []
        for part in self.parts:
            start = max(indices.start, part.run.start)
            stop = min(indices.stop, part.run.start + part.run.length)
            if start < stop:
                first = part.position - part.run.start
                stored = range(first + start, first + stop)
                found.append(sample(root, part.view.stored, self.dim, window, stored))
        return torch.cat(found)


def blocks(held: Held, other: Held) -> Iterator[tuple[range, range]]:
    """(rows, indices) that cover a tensor, small enough to be held for both directories at once."""
    unit_bytes = max(held.unit_bytes, other.unit_bytes)
    if held.dim == 0:
        step = max(1, BUFFER_BYTES // unit_bytes)
        for start in range(0, held.num_indices, step):
            yield range(1), range(start, min(start + step, held.num_indices))
    else:
        step = max(1, BUFFER_BYTES // (held.num_indices * unit_bytes))
        for start in range(0, held.num_rows, step):
            yield range(start, min(start + step, held.num_rows)), range(held.num_indices)


def sample(root: Path, stored: Stored, dim: int, window: range, indices: range | None = None) -> Tensor:
    """[index along ``dim``, place in ``window``]: a few places of every index, read through a map of the file.

    ``window`` is of the other dimension; with ``dim`` 0 and several others, of all of them together.
    """
    rows, length, unit = math.prod(stored.shape[:dim]), stored.shape[dim], math.prod(stored.shape[dim + 1 :])
    indices = range(length) if indices is None else indices
    mapped = np.memmap(root / stored.file, _BITS[stored.dtype.itemsize], "r", stored.offset, (rows, length, unit))
    if dim == 0:
        found = mapped[0, indices.start : indices.stop, window.start : window.stop]
    else:
        found = mapped[window.start : window.stop, indices.start : indices.stop, 0].T
    return torch.from_numpy(np.array(found, order="C")).view(stored.dtype)


@dataclass(frozen=True)
class Side:
    """One of the directories."""

    path: Path
    """What files are relative to."""
    kind: Kind
    model: ModelConfig
    is_stated: bool
    """Whether the directory itself says that ``model`` is what it holds."""
    tp_size: int
    placed: tuple[Placed, ...]
    misfits: tuple[Misfit, ...] = ()
    problems: tuple[str, ...] = ()
    """Tensors that belong to nothing, or why nothing can be compared."""
    is_vit_only: bool = False

    @cached_property
    def twins(self) -> tuple[tuple[View, View], ...]:
        """What must be equal, because it holds the same of the model; the first is the one that is compared."""
        first: dict[tuple[Run, ...], View] = {}
        held = [one.view for one in self.placed if any(run.key is not None for run in one.view.runs)]
        return tuple((kept, view) for view in held if (kept := first.setdefault(view.runs, view)) is not view)

    @cached_property
    def _primary(self) -> tuple[Placed, ...]:
        """Without the later of ``twins``."""
        later = {id(view) for _, view in self.twins}
        return tuple(one for one in self.placed if id(one.view) not in later)

    @cached_property
    def _parts(self) -> Mapping[str, list[Part]]:
        parts: dict[str, list[Part]] = {}
        for one in self._primary:
            position = 0
            for run in one.view.runs:
                if run.key is not None:
                    parts.setdefault(run.key, []).append(Part(one.view, position, run))
                position += run.length
        return parts

    def held(self, key: str, shape: tuple[int, ...]) -> Held | None:
        """The published tensor ``key`` of this ``shape``; None when it is not there in whole, or in two dtypes."""
        parts = sorted(self._parts.get(key, ()), key=lambda part: part.run.start)
        if not parts or len(self.dtypes(key)) > 1:
            return None
        view = parts[0].view
        rest = (view.stored.shape[: view.dim], view.stored.shape[view.dim + 1 :])
        is_like = rest == (shape[: view.dim], shape[view.dim + 1 :])
        if not is_like or sum(part.run.length for part in parts) != shape[view.dim]:
            return None
        return Held(tuple(parts), view.num_rows, shape[view.dim], view.unit_bytes)

    def dtypes(self, key: str) -> set[torch.dtype]:
        """Of whatever there is of a published tensor."""
        return {part.view.stored.dtype for part in self._parts.get(key, ())}

    def views_of(self, weight: Weight) -> list[View]:
        """Of the weight's tensors, in the order of tensor-parallel ranks, once each."""
        numbers = {number for key in weight.hf_names for number in self._numbers.get(key, ())}
        return [self._primary[number].view for number in sorted(numbers)]

    def twins_of(self, weight: Weight) -> list[tuple[View, View]]:
        """Those of ``twins`` that hold the weight's tensors."""
        return [pair for key in weight.hf_names for pair in self._twins.get(key, ())]

    @cached_property
    def _numbers(self) -> Mapping[str, list[int]]:
        """Where in ``_primary`` the parts of a published tensor are."""
        numbers: dict[str, list[int]] = {}
        for number, one in enumerate(self._primary):
            for key in one.weight.hf_names:
                numbers.setdefault(key, []).append(number)
        return numbers

    @cached_property
    def _twins(self) -> Mapping[str, list[tuple[View, View]]]:
        twins: dict[str, list[tuple[View, View]]] = {}
        for one, other in self.twins:
            twins.setdefault(next(run.key for run in one.runs if run.key is not None), []).append((one, other))
        return twins

    def where(self, stored: Stored) -> str:
        return f"{self.path / stored.file}: {stored.name}"


def open_sides(source_dir: str | Path, target_dir: str | Path, hf_dir: str | Path | None) -> tuple[Side, Side]:
    """Both directories, of any kind and layout.

    What model a directory without a manifest holds is said by ``hf_dir``, else by the other directory, else by its
    shapes.

    Raises:
        UserError: one is of no kind, damaged, or nobody says what model it holds.
    """
    given = HFDirectory.open(hf_dir, weights_required=False).model_config() if hf_dir else None
    paths = ((Path(source_dir), "--cfg.source_dir"), (Path(target_dir), "--cfg.target_dir"))
    kinds = [find_kind(path, flag) for path, flag in paths]
    converted = [number for number, kind in enumerate(kinds) if kind is Kind.MINDSPEED]
    stating = {number: _stating_side(path, kind, flag)
               for number, ((path, flag), kind) in enumerate(zip(paths, kinds, strict=True)) if number not in converted}
    opened = {number: MindSpeedDirectory.open(paths[number][0]) for number in converted}
    models = [side.model for side in stating.values()]
    models += [directory.manifest.model for directory in opened.values() if directory.manifest]
    assumed = given or next(iter(models), None)
    source, target = (stating.get(number) or _mm_side(opened[number], assumed) for number in range(2))
    return source, target


def _stating_side(path: Path, kind: Kind, flag: str) -> Side:
    source = open_source(path, flag, lenient=True)
    placed = tuple(Placed(view.weight, view) for view in source.views)
    misfits = tuple(Misfit(one.weight, one.tp_rank, one.text, one.stored) for one in source.problems if one.weight)
    problems = tuple(one.text for one in source.problems if one.weight is None)
    return Side(source.path, kind, source.model, True, source.tp_size, placed, misfits, problems)


def _mm_side(directory: MindSpeedDirectory, assumed: ModelConfig | None) -> Side:
    model = assumed or recognize(directory)
    is_stated, is_vit_only = directory.manifest is not None, directory.storage.vit_only
    try:
        on_layout, tp_size = directory.placed_model(None, "", model)
    except UserError as error:
        known = None if model is None else recognize(directory)
        if known is None and assumed is None:
            raise
        if known is None:  # it holds another model than the other directory
            return Side(directory.path, Kind.MINDSPEED, assumed, False, 1, (), (), error.problems, is_vit_only)
        on_layout, tp_size = directory.placed_model(None, "", known)
    views, found = directory.views(on_layout, tp_size)
    placed = [Placed(view.weight, view) for view in views]
    misfits = [Misfit(one.weight, one.tp_rank, one.text, one.stored) for one in found if one.weight]
    problems = [one.text for one in found if one.weight is None]
    return Side(directory.path, Kind.MINDSPEED, on_layout, is_stated, tp_size, tuple(placed), tuple(misfits),
                tuple(problems), is_vit_only)
