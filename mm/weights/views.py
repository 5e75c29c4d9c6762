"""Tensors in files, and which part of which weight each one holds.

Opens no file.  Conversions, loading and comparisons learn from views what the bytes of a file mean, and find by the
same ``ViewIndex`` where a range of the model is stored.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from mm.weights.fuse import fuse_pieces, hf_ranges
from mm.weights.table import Weight

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """Consecutive indices of one Hugging Face tensor along ``cut_dim``."""

    key: str | None
    """Published name of the Hugging Face tensor; None for zero padding."""
    start: int
    """First index in that tensor; 0 for padding."""
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


def cut_dim(weight: Weight) -> int:
    """The one dimension along which the shards of ``weight`` differ from its Hugging Face tensors."""
    return weight.tp_dim or 0


@cache  # a comparison of two directories asks for the same shards again
def shard_spans(weight: Weight, tp_size: int, tp_rank: int) -> tuple[Span, ...]:
    """One rank's shard as spans, from its first index along ``cut_dim`` to its last.

    The indices are numbered, the layout rules of ``mm.weights.table`` applied to the numbers, and the spans read off,
    so no rule is repeated here.  Tensors a (4 indices) and b (2) are numbered 1 2 3 4 and 6 7.  If the rules give this
    rank 1 2 6 0, its spans are a[0:2], b[0:1] and one of padding.
    """
    dim = cut_dim(weight)
    sizes = [shape[dim] for shape in weight.hf_shapes]
    is_cut = weight.tp_dim is not None
    ranges = hf_ranges(weight, tp_size, tp_rank) if is_cut else tuple((range(size),) for size in sizes)
    # Numbers start at 1, because padding is 0, and skip one between tensors, so that no span crosses an end.
    firsts = [1 + sum(sizes[:index]) + index for index in range(len(sizes))]
    pieces: list[torch.Tensor] = []
    for first, kept in zip(firsts, ranges, strict=True):
        numbers = torch.cat([torch.arange(first + one.start, first + one.stop) for one in kept])
        pieces.append(numbers.reshape((1,) * dim + (-1,)))
    numbers = fuse_pieces(weight, pieces, tp_size).flatten()
    continues = numbers[1:] - numbers[:-1] == (numbers[:-1] != 0).long()
    starts = [0, *(int(place) + 1 for place in torch.nonzero(~continues))]
    spans: list[Span] = []
    for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True):
        number = int(numbers[start])
        if number == 0:
            spans.append(Span(None, 0, stop - start))
        else:
            index = max(index for index, first in enumerate(firsts) if first <= number)
            spans.append(Span(weight.hf_names[index], number - firsts[index], stop - start))
    return tuple(spans)


def share_numbers(weight: Weight, one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two shards (number of shards, which one) of a weight with a ``tp_dim`` have any number in common."""
    cut = replace(weight, is_whole=False)
    pairs = zip(hf_ranges(cut, *one), hf_ranges(cut, *other), strict=True)
    return any(max(a.start, b.start) < min(a.stop, b.stop) for first, second in pairs for a in first for b in second)


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    file: str
    """Relative to the directory that is read or written."""
    name: str
    """As spelled in the file; in a torch file after the key of its chunk: ``model/NAME``, ``model0/NAME``."""
    dtype: torch.dtype
    shape: Shape
    offset: int
    """Position of its first byte in the file; 0 where only a manifest was read, which does not state it."""
    crc32: int | None = None
    """Checksum of its bytes, where a manifest states one."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TargetFile:
    """A file to write: tensors, and the bytes around them (its frame), such as a header."""

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
class View:
    """A stored tensor, and the spans of ``weight`` that it holds along ``dim``, in order."""

    stored: Stored
    weight: Weight
    spans: tuple[Span, ...]

    @property
    def dim(self) -> int:
        return cut_dim(self.weight)

    @property
    def num_rows(self) -> int:
        """Rows of bytes that lie one after the other; spans are ranges of columns of them."""
        return math.prod(self.stored.shape[: self.dim])

    @property
    def num_indices(self) -> int:
        return self.stored.shape[self.dim]

    @property
    def index_bytes(self) -> int:
        """Bytes of one index along ``dim`` within one row."""
        return math.prod(self.stored.shape[self.dim + 1 :]) * self.stored.dtype.itemsize

    def blocks(self, indices: range, num_bytes: int) -> Iterator[tuple[range, range]]:
        """(rows, indices) that cover ``indices`` of every row in the order of the file, ``num_bytes`` at a time."""
        if self.num_rows == 1:
            step = max(1, num_bytes // self.index_bytes)
            yield from ((range(1), indices[start : start + step]) for start in range(0, len(indices), step))
        else:
            step = max(1, num_bytes // (len(indices) * self.index_bytes))
            rows = range(self.num_rows)
            yield from ((rows[start : start + step], indices) for start in range(0, len(rows), step))


def shard_view(stored: Stored, weight: Weight, tp_size: int, tp_rank: int) -> View:
    """The view of ``stored``, which holds one rank's shard of ``weight``."""
    return View(stored, weight, shard_spans(weight, tp_size, tp_rank))


def whole_view(stored: Stored, hf_name: str, weight: Weight) -> View:
    """The view of ``stored``, which holds the whole Hugging Face tensor ``hf_name`` of ``weight``."""
    return View(stored, weight, (Span(hf_name, 0, stored.shape[cut_dim(weight)]),))


def whole_views(
    weights: Iterable[Weight], tensors: Mapping[str, Stored], missing: Callable[[str, Shape], str],
    other_shape: Callable[[str, Shape, Stored], str],
) -> tuple[list[View], list[str], list[str]]:
    """Views of ``weights`` in ``tensors`` (by Hugging Face name), problems, and the names that no weight has.

    ``missing`` and ``other_shape`` make the messages, from the name, the expected shape and the stored tensor.
    """
    views: list[View] = []
    problems: list[str] = []
    left_over = set(tensors)
    for weight in weights:
        for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
            stored = tensors.get(name)
            left_over.discard(name)
            if stored is None:
                problems.append(missing(name, shape))
            elif stored.shape != shape:
                problems.append(other_shape(name, shape, stored))
            else:
                views.append(whole_view(stored, name, weight))
    return views, problems, sorted(left_over)


@dataclass(frozen=True)
class StoredSpan:
    """A range of one tensor of the model, or of padding, as a view holds it."""

    view: View
    start: int
    """Index along the view's ``dim`` at which the range begins."""
    span: Span

    @property
    def stop(self) -> int:
        return self.start + self.span.length


class ViewIndex:
    """Finds which view holds a range of a tensor of the model.

    Several views may hold the same spans (replicas on tensor-parallel ranks, the copy of a tied embedding): the first
    is read, the others are its ``copies``.
    """

    def __init__(self, views: Iterable[View]) -> None:
        first: dict[tuple[Span, ...], View] = {}
        self.copies: list[tuple[View, View]] = []
        """Pairs that must be equal, because only the first of each is read."""
        self.padding: list[StoredSpan] = []
        """It must be zero, because it is not read."""
        self._stored: dict[str, list[StoredSpan]] = {}
        for view in views:
            holds_model = any(span.key is not None for span in view.spans)
            kept = first.setdefault(view.spans, view) if holds_model else view
            if kept is not view:
                self.copies.append((kept, view))
            position = 0
            for span in view.spans:
                part = StoredSpan(view, position, span)
                position += span.length
                if span.key is None:
                    self.padding.append(part)
                elif kept is view:
                    self._stored.setdefault(span.key, []).append(part)
            assert position == view.num_indices, view
        for spans_of_key in self._stored.values():
            spans_of_key.sort(key=lambda part: part.span.start)

    def find(self, span: Span) -> Sequence[StoredSpan]:
        """The stored parts of ``span``, in order."""
        found: list[StoredSpan] = []
        reached = span.start
        for part in self._stored.get(span.key, ()) if span.key is not None else ():
            held, stop = part.span, min(part.span.stop, span.stop)
            if held.start <= reached < stop:
                start = part.start + reached - held.start
                found.append(StoredSpan(part.view, start, Span(span.key, reached, stop - reached)))
                reached = stop
        assert span.key is None or reached == span.stop, f"{span} is not stored"
        return found


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in messages, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
