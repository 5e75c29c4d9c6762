"""The index of who holds which range of the model, and the byte plan of a conversion, from headers alone.

Pure: opens no file.  Conversions, loading and comparisons find what they need by the same ``Index``.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mm.errors import UserError
from mm.weights.cut import Run
from mm.weights.views import Stored, View


class TargetFile(Protocol):
    """A file to write.  Its tensors are copied by the plan; the rest of it, such as a header, is its frame."""

    @property
    def name(self) -> str:
        """Relative to the directory that is written."""

    @property
    def tensors(self) -> tuple[Stored, ...]: ...

    @property
    def num_bytes(self) -> int: ...

    def frame(self, crc32s: Mapping[str, int]) -> Iterable[tuple[int, bytes]]:
        """(offset, bytes) of everything that is not tensor data; ``crc32s`` are those of the tensors by name."""


@dataclass(frozen=True)
class Move:
    """The same columns of bytes of every row: from a source to a target of the job."""

    source: int
    source_start: int
    target: int
    target_start: int
    num_bytes: int


@dataclass(frozen=True)
class Job:
    """Tensors that are written in one pass over their sources; what no move fills is zero.

    Each source and target is a block of ``num_rows`` equally long rows of bytes.  With one row, a job has one target
    and its moves are in the order of the target.
    """

    num_rows: int
    sources: tuple[Stored, ...]
    targets: tuple[Stored, ...]
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Padding:
    """The same columns of bytes of every row of a tensor."""

    view: View
    start: int
    num_bytes: int
    """Length of the columns in one row."""


@dataclass(frozen=True)
class Part:
    """A range of one tensor of the model, as a view holds it."""

    view: View
    start: int
    """Index along the view's ``dim`` at which the range begins."""
    run: Run

    @property
    def stop(self) -> int:
        """One after the last index along the view's ``dim``."""
        return self.start + self.run.length


class Index:
    """Finds which view holds a range of a tensor of the model.

    Several views may hold the same runs (replicas on tensor-parallel ranks, the copy of a tied embedding): the first is
    read, the others are its ``copies``.
    """

    def __init__(self, views: Iterable[View]) -> None:
        first: dict[tuple[Run, ...], View] = {}
        copies, padding = [], []
        for view in views:
            kept = view if view.is_padding else first.setdefault(view.runs, view)
            if kept is not view:
                copies.append((kept, view))
            padding += [Padding(view, position * view.unit_bytes, run.length * view.unit_bytes)
                        for position, run in view.positions() if run.key is None]
        self.views = tuple(first.values())
        """What is read: no copies, and nothing that is padding only."""
        self.copies: tuple[tuple[View, View], ...] = tuple(copies)
        """Pairs that must be equal, because only the first of each is read."""
        self.padding: tuple[Padding, ...] = tuple(padding)
        """What must be zero, because it is not read; also of copies and of views that hold nothing else."""
        self._parts: dict[str, list[Part]] = {}
        for view in self.views:
            for position, run in view.positions():
                if run.key is not None:
                    self._parts.setdefault(run.key, []).append(Part(view, position, run))
        for parts in self._parts.values():
            parts.sort(key=lambda part: part.run.start)

    def parts(self, key: str) -> Sequence[Part]:
        """Everything there is of the Hugging Face tensor ``key``, in the order of its indices."""
        return self._parts.get(key, ())

    def find(self, run: Run) -> Iterator[Part]:
        """The parts of ``run``, cut to it, in order; where something is missing, they do not reach to its end."""
        reached = run.start
        for part in self.parts(run.key) if run.key is not None else ():
            held = part.run
            if held.start <= reached < min(held.stop, run.stop):
                stop = min(held.stop, run.stop)
                yield Part(part.view, part.start + reached - held.start, Run(run.key, reached, stop - reached))
                reached = stop

    def overlaps(self) -> Iterator[str]:
        """Problems: two views that hold the same index, and are no copies."""
        for key, parts in self._parts.items():
            for before, after in itertools.pairwise(parts):
                if after.run.start < before.run.stop:
                    one, other = before.view.stored, after.view.stored
                    yield (
                        f"{one.file}: {one.name} and {other.file}: {other.name} both hold index {after.run.start} of "
                        f"{key}; expected each weight once. Were the files of two layouts mixed?"
                    )


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion copies."""

    files: tuple[TargetFile, ...]
    jobs: tuple[Job, ...]
    """In the order of the files."""

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.files)


def make_plan(sources: Index, targets: Sequence[View], files: Sequence[TargetFile]) -> Plan:
    """Cover every byte of ``targets`` from ``sources``, and use every byte of the sources.

    ``files`` hold the targets.

    Raises:
        UserError: naming each tensor that has no source, no place, or another dtype.
    """
    planner = _Planner(sources)
    groups: dict[tuple[str, str], list[View]] = {}
    for view in targets:
        keys = [run.key for run in view.runs if run.key is not None]
        shares_rows = view.dim > 0 and keys
        # Targets that are cut by columns share their sources' rows, so they are written together.
        group = ("key", keys[0]) if shares_rows else (view.stored.file, view.stored.name)
        groups.setdefault(group, []).append(view)
    jobs: list[Job] = []
    for views in groups.values():
        jobs += planner.jobs(views)
    problems = list(dict.fromkeys([*sources.overlaps(), *planner.problems, *planner.unused()]))
    if problems:
        raise UserError(problems)
    return Plan(tuple(files), tuple(jobs))


_Moves = list[tuple[Stored, Move]]
"""Moves with ``source`` and ``target`` still 0, and the source of each."""


class _Planner:
    """Makes jobs, and keeps account of what was used of each source."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._used = dict.fromkeys((view.stored for view in index.views), 0)
        self.problems: list[str] = []

    def jobs(self, targets: Sequence[View]) -> Iterator[Job]:
        """The jobs that write ``targets``, which have their number of rows in common unless they are alone."""
        shared: list[tuple[View, _Moves]] = []
        for target in targets:
            moves = list(self._moves(target))
            if target.num_rows == 1 or all(self._is_whole_row(target, source, move) for source, move in moves):
                yield _job(1, [(target, [(source, _whole(move, target)) for source, move in moves])])
            else:
                shared.append((target, moves))
        if shared:
            yield _job(shared[0][0].num_rows, shared)

    def _is_whole_row(self, target: View, source: Stored, move: Move) -> bool:
        return all(move.num_bytes * target.num_rows == stored.num_bytes for stored in (target.stored, source))

    def _moves(self, target: View) -> Iterator[tuple[Stored, Move]]:
        """In the order of the target."""
        unit = target.unit_bytes
        for position, run in target.positions():
            reached = run.start
            for part in self._index.find(run):
                self._check(part.view, target)
                self._used[part.view.stored] += part.run.length
                yield part.view.stored, Move(
                    source=0,
                    source_start=part.start * unit,
                    target=0,
                    target_start=(position + part.run.start - run.start) * unit,
                    num_bytes=part.run.length * unit,
                )
                reached = part.run.stop
            if run.key is not None and reached != run.stop:
                self.problems.append(
                    f"The source holds no index {reached} to {run.stop - 1} of {run.key}, needed for "
                    f"{target.stored.name} in {target.stored.file}; give the complete source."
                )

    def _check(self, source: View, target: View) -> None:
        assert (source.dim, source.num_rows) == (target.dim, target.num_rows), (source, target)
        if source.stored.dtype != target.stored.dtype:
            self.problems.append(
                f"{source.stored.file}: {source.stored.name} is {_short(source.stored.dtype)}, but "
                f"{target.stored.name} in {target.stored.file} would be {_short(target.stored.dtype)}; a conversion "
                f"changes no dtype. Give a source, or a Hugging Face directory, of the same dtype throughout."
            )

    def unused(self) -> Iterator[str]:
        """Problems: sources that were not used in whole."""
        for view in self._index.views:
            if self._used[view.stored] < sum(run.length for run in view.runs if run.key is not None):
                yield f"{view.stored.file}: {view.stored.name} has no place in the target."


def _whole(move: Move, target: View) -> Move:
    """A move of whole rows as one of the whole block; with one row nothing changes."""
    rows = target.num_rows
    return Move(0, move.source_start * rows, 0, move.target_start * rows, move.num_bytes * rows)


def _job(num_rows: int, targets: Sequence[tuple[View, _Moves]]) -> Job:
    numbers: dict[Stored, int] = {}
    moves = []
    for target_number, (_, found) in enumerate(targets):
        for source, move in found:
            number = numbers.setdefault(source, len(numbers))
            moves.append(Move(number, move.source_start, target_number, move.target_start, move.num_bytes))
    return Job(num_rows, tuple(numbers), tuple(view.stored for view, _ in targets), tuple(moves))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
