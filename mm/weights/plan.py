"""The byte plan of a conversion: which bytes of which source file go where, computed from headers alone.

Pure: opens no file.  It knows nothing of models either: what a stored tensor holds is said by its views.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from mm.errors import UserError
from mm.weights.views import ModelRun, Stored, View


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
        """(offset, bytes) of everything that is not tensor data; ``crc32s`` are those of the tensors by name.

        Their names are those of ``Stored``, of which a file holds each once.
        """


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

    stored: Stored
    num_rows: int
    start: int
    num_bytes: int
    """Of one row."""


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion copies."""

    files: tuple[TargetFile, ...]
    jobs: tuple[Job, ...]
    """In the order of the files."""
    twins: tuple[tuple[Stored, Stored], ...]
    """Source tensors that must be equal, because only the first of each pair is read."""
    padding: tuple[Padding, ...]
    """Parts of source tensors that must be zero, because they are not read at all."""

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.files)


def make_plan(sources: Sequence[View], targets: Sequence[View], files: Sequence[TargetFile]) -> Plan:
    """Cover every byte of ``targets`` from ``sources``, and use every byte of the sources.

    ``files`` hold the targets.  Several sources may hold the same runs (replicas on tensor-parallel ranks, the copy of
    a tied embedding): one is read, the others are ``twins``.

    Raises:
        UserError: naming each tensor that has no source, no place, or another dtype.
    """
    primary, twins = _without_twins(sources)
    index = _Index(primary)
    groups: dict[tuple[str, str], list[View]] = {}
    for view in targets:
        keys = [run.key for run in view.runs if run.key is not None]
        shares_rows = view.dim > 0 and keys
        # Targets that are cut by columns share their sources' rows, so they are written together.
        group = ("key", keys[0]) if shares_rows else (view.stored.file, view.stored.name)
        groups.setdefault(group, []).append(view)
    jobs: list[Job] = []
    for views in groups.values():
        jobs += index.jobs(views)
    problems = list(dict.fromkeys([*index.problems, *index.unused()]))
    if problems:
        raise UserError(problems)
    return Plan(tuple(files), tuple(jobs), twins, tuple(padding_parts(sources)))


def _without_twins(sources: Sequence[View]) -> tuple[list[View], tuple[tuple[Stored, Stored], ...]]:
    first: dict[tuple[ModelRun, ...], View] = {}
    twins = []
    for view in sources:
        if all(run.key is None for run in view.runs):
            continue
        kept = first.setdefault(view.runs, view)
        if kept is not view:
            twins.append((kept.stored, view.stored))
    return list(first.values()), tuple(twins)


def padding_parts(sources: Iterable[View]) -> Iterator[Padding]:
    """Whatever of ``sources`` is padding."""
    for view in sources:
        for position, run in _positions(view):
            if run.key is None:
                unit = view.unit_bytes
                yield Padding(view.stored, view.num_rows, position * unit, run.length * unit)


@dataclass(frozen=True)
class _Piece:
    """A run of a source: ``position`` is its first index along the source's ``dim``."""

    view: int
    position: int
    run: ModelRun


class _Index:
    """Finds who holds a range of a tensor of the model, and keeps account of what was used."""

    def __init__(self, sources: Sequence[View]) -> None:
        self.sources = sources
        self.problems: list[str] = []
        self._pieces: dict[str, list[_Piece]] = {}
        self._used = [0] * len(sources)
        for number, view in enumerate(sources):
            for position, run in _positions(view):
                if run.key is not None:
                    self._pieces.setdefault(run.key, []).append(_Piece(number, position, run))
        for key, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece.run.start)
            for before, after in pairwise(pieces):
                if after.run.start < before.run.start + before.run.length:
                    one, other = (sources[piece.view].stored for piece in (before, after))
                    self.problems.append(
                        f"{one.file}: {one.name} and {other.file}: {other.name} both hold index {after.run.start} of "
                        f"{key}; expected each weight once. Were the files of two layouts mixed?"
                    )

    def jobs(self, targets: Sequence[View]) -> Iterator[Job]:
        """The jobs that write ``targets``, which have their number of rows in common unless they are alone."""
        shared: list[tuple[View, list[tuple[int, Move]]]] = []
        for target in targets:
            moves = list(self._moves(target))
            used = {source for source, _ in moves}
            if target.num_rows == 1 or all(self._is_whole_row(target, source, move) for source, move in moves):
                yield _job(1, [(target, [(s, _whole(move, target)) for s, move in moves])], self.sources)
            else:
                assert used
                shared.append((target, moves))
        if shared:
            yield _job(shared[0][0].num_rows, shared, self.sources)

    def _is_whole_row(self, target: View, source: int, move: Move) -> bool:
        return all(move.num_bytes * view.num_rows == view.stored.num_bytes for view in (target, self.sources[source]))

    def _moves(self, target: View) -> Iterator[tuple[int, Move]]:
        """(source, move with ``source`` and ``target`` still 0), in the order of the target."""
        for position, run in _positions(target):
            if run.key is None:
                continue
            reached, stop = run.start, run.start + run.length
            for piece in self._pieces.get(run.key, ()):
                piece_stop = piece.run.start + piece.run.length
                if piece.run.start <= reached < min(piece_stop, stop):
                    view, end = self.sources[piece.view], min(piece_stop, stop)
                    self._check(view, target)
                    self._used[piece.view] += end - reached
                    unit = target.unit_bytes
                    yield piece.view, Move(
                        source=0,
                        source_start=(piece.position + reached - piece.run.start) * unit,
                        target=0,
                        target_start=(position + reached - run.start) * unit,
                        num_bytes=(end - reached) * unit,
                    )
                    reached = end
            if reached != stop:
                self.problems.append(
                    f"The source holds no index {reached} to {stop - 1} of {run.key}, needed for {target.stored.name} "
                    f"in {target.stored.file}; give the complete source."
                )

    def _check(self, source: View, target: View) -> None:
        assert (source.dim, source.num_rows) == (target.dim, target.num_rows), (source, target)
        if source.stored.dtype != target.stored.dtype:
            self.problems.append(
                f"{source.stored.file}: {source.stored.name} is {_short(source.stored.dtype)}, but "
                f"{target.stored.name} in {target.stored.file} would be {_short(target.stored.dtype)}; a conversion "
                f"changes no dtype. Give a source, or a Hugging Face directory, of the same dtype throughout."
            )

    def unused(self) -> list[str]:
        """Problems: sources that were not used in whole."""
        problems = []
        for view, used in zip(self.sources, self._used, strict=True):
            if used < sum(run.length for run in view.runs if run.key is not None):
                problems.append(f"{view.stored.file}: {view.stored.name} has no place in the target.")
        return problems


def _positions(view: View) -> Iterator[tuple[int, ModelRun]]:
    position = 0
    for run in view.runs:
        yield position, run
        position += run.length
    assert position == view.stored.shape[view.dim], view


def _whole(move: Move, target: View) -> Move:
    """A move of whole rows as one of the whole block; with one row nothing changes."""
    rows = target.num_rows
    return Move(0, move.source_start * rows, 0, move.target_start * rows, move.num_bytes * rows)


def _job(num_rows: int, targets: Sequence[tuple[View, list[tuple[int, Move]]]], sources: Sequence[View]) -> Job:
    numbers: dict[int, int] = {}  # of a source in the plan -> of the source in the job
    moves = []
    for target_number, (_, found) in enumerate(targets):
        for source, move in found:
            number = numbers.setdefault(source, len(numbers))
            moves.append(Move(number, move.source_start, target_number, move.target_start, move.num_bytes))
    return Job(
        num_rows,
        tuple(sources[source].stored for source in numbers),
        tuple(view.stored for view, _ in targets),
        tuple(moves),
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
