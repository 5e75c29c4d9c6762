"""The index of who holds which range of the model, and the byte plan of a conversion, from headers alone.

Pure: opens no file.  Conversions, loading and comparisons find what they need by the same ``ViewIndex``.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from mm.errors import refuse
from mm.weights.cut import Span
from mm.weights.views import Stored, View


@dataclass(frozen=True)
class TargetFile:
    """A file to write.  Its tensors are copied by the plan; the rest of it, such as a header, is its frame."""

    name: str
    """Relative to the directory that is written."""
    tensors: tuple[Stored, ...]
    num_bytes: int
    pieces: tuple[tuple[int, bytes], ...]
    """(offset, bytes) of the frame."""

    def frame(self, crc32s: Mapping[str, int]) -> Sequence[tuple[int, bytes]]:
        """The frame of the finished file; ``crc32s`` are the checksums of its tensors by name."""
        return self.pieces


@dataclass(frozen=True)
class Move:
    """The same columns of bytes of every row, from a stored tensor to a target of the job."""

    source: Stored
    source_start: int
    target: Stored
    target_start: int
    num_bytes: int


@dataclass(frozen=True)
class Job:
    """Tensors that are written in one pass over their sources; what no move fills is zero.

    Each source and target is a block of ``num_rows`` equally long rows of bytes.  The moves of a target are in its
    order.
    """

    num_rows: int
    targets: tuple[Stored, ...]
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Stretch:
    """A range of one tensor of the model, or of padding, as a view holds it."""

    view: View
    start: int
    """Index along the view's ``dim`` at which the range begins."""
    span: Span

    @property
    def stop(self) -> int:
        """One after the last index along the view's ``dim``."""
        return self.start + self.span.length


class ViewIndex:
    """Finds which view holds a range of a tensor of the model.

    Several views may hold the same spans (replicas on tensor-parallel ranks, the copy of a tied embedding): the first
    is read, the others are its ``copies``.
    """

    def __init__(self, views: Iterable[View]) -> None:
        first: dict[tuple[Span, ...], View] = {}
        copies: list[tuple[View, View]] = []
        padding: list[Stretch] = []
        for view in views:
            holds_model = any(span.key is not None for span in view.spans)
            kept = first.setdefault(view.spans, view) if holds_model else view
            if kept is not view:
                copies.append((kept, view))
            padding += [Stretch(view, *at) for at in view.positions() if at[1].key is None]
        self.views = tuple(first.values())
        """The views to read: no copies, and none that hold only padding."""
        self.copies = tuple(copies)
        """Pairs that must be equal, because only the first of each is read."""
        self.padding = tuple(padding)
        """Padding, also in copies and in views that hold nothing else: it must be zero, because it is not read."""
        self._stretches: dict[str, list[Stretch]] = {}
        for view in self.views:
            for position, span in view.positions():
                if span.key is not None:
                    self._stretches.setdefault(span.key, []).append(Stretch(view, position, span))
        for stretches in self._stretches.values():
            stretches.sort(key=lambda stretch: stretch.span.start)

    def stretches(self, key: str) -> Sequence[Stretch]:
        """Everything there is of the Hugging Face tensor ``key``, in the order of its indices."""
        return self._stretches.get(key, ())

    def find(self, span: Span) -> Iterator[Stretch]:
        """The stored parts of ``span``, in order; they end early if something is missing."""
        reached = span.start
        for stretch in self.stretches(span.key) if span.key is not None else ():
            held, stop = stretch.span, min(stretch.span.stop, span.stop)
            if held.start <= reached < stop:
                start = stretch.start + reached - held.start
                yield Stretch(stretch.view, start, Span(span.key, reached, stop - reached))
                reached = stop

    def overlaps(self) -> Iterator[str]:
        """Problems: two views that hold the same index and are no copies."""
        for key, stretches in self._stretches.items():
            for before, after in itertools.pairwise(stretches):
                if after.span.start < before.span.stop:
                    one, other = before.view.stored, after.view.stored
                    yield (
                        f"{one.file}: {one.name} and {other.file}: {other.name} both contain index {after.span.start} "
                        f"of {key}; expected each weight once. Are the files of two layouts mixed?"
                    )


@dataclass(frozen=True)
class CopyPlan:
    """Everything that a conversion copies."""

    files: tuple[TargetFile, ...]
    jobs: tuple[Job, ...]
    """In the order of the files."""

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.files)


def make_plan(sources: ViewIndex, targets: Sequence[View], files: Sequence[TargetFile]) -> CopyPlan:
    """Cover every byte of ``targets`` from ``sources``, and use every byte of the sources.

    ``files`` hold the targets.  Raises UserError naming each tensor that has no source, no place, or another dtype.
    """
    planner = _Planner(sources)
    groups: dict[tuple[str, str], list[View]] = {}
    for view in targets:
        keys = [span.key for span in view.spans if span.key is not None]
        shares_rows = view.dim > 0 and keys
        # Targets that are cut by columns read the same rows of their sources, so they are written together.
        group = ("key", keys[0]) if shares_rows else (view.stored.file, view.stored.name)
        groups.setdefault(group, []).append(view)
    jobs = tuple(planner.job(views) for views in groups.values())
    refuse((*sources.overlaps(), *planner.problems, *planner.unused()))
    return CopyPlan(tuple(files), jobs)


class _Planner:
    """Makes jobs, and records which parts of each source were used."""

    def __init__(self, index: ViewIndex) -> None:
        self._index = index
        self._used = dict.fromkeys((view.stored for view in index.views), 0)
        self.problems: list[str] = []

    def job(self, targets: Sequence[View]) -> Job:
        """The job that writes ``targets``, which have their number of rows in common."""
        moves = tuple(move for target in targets for move in self._moves(target))
        return Job(targets[0].num_rows, tuple(target.stored for target in targets), moves)

    def _moves(self, target: View) -> Iterator[Move]:
        """In the order of the target."""
        unit = target.unit_bytes
        for position, span in target.positions():
            reached = span.start
            for found in self._index.find(span):
                source = found.view.stored
                self._check(found.view, target)
                self._used[source] += found.span.length
                target_start = (position + found.span.start - span.start) * unit
                yield Move(source, found.start * unit, target.stored, target_start, found.span.length * unit)
                reached = found.span.stop
            if span.key is not None and reached != span.stop:
                self.problems.append(
                    f"The source does not have index {reached} to {span.stop - 1} of {span.key}, needed for "
                    f"{target.stored.name} in {target.stored.file}; give the complete source."
                )

    def _check(self, source: View, target: View) -> None:
        assert (source.dim, source.num_rows) == (target.dim, target.num_rows), (source, target)
        if source.stored.dtype != target.stored.dtype:
            self.problems.append(
                f"{source.stored.file}: {source.stored.name} is {dtype_name(source.stored.dtype)}, but "
                f"{target.stored.name} in {target.stored.file} would be {dtype_name(target.stored.dtype)}; "
                "a conversion does not change dtypes. "
                "Give a source, or a Hugging Face directory, of the same dtype throughout."
            )

    def unused(self) -> Iterator[str]:
        """Problems: sources that were not used completely."""
        for view in self._index.views:
            if self._used[view.stored] < sum(span.length for span in view.spans if span.key is not None):
                yield f"{view.stored.file}: {view.stored.name} has no counterpart in the target."


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in messages, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
