"""Tensors in files, and which part of which tensor of the model each one holds.

Pure: opens no file.  Conversions and loading learn from views what the bytes of a file mean.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from mm.weights.cut import Span, cut_dim, shard_spans
from mm.weights.table import Weight

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    file: str
    """Relative to the directory that is read or written."""
    name: str
    """As spelled in the file; in a torch file after the key of its chunk: ``model/NAME``, ``model0/NAME``."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Position of its first byte in the file; 0 where only a manifest was read, which does not state it."""
    crc32: int | None = None
    """Checksum of its bytes, where a manifest states one."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class View:
    """A stored tensor, and the spans of ``weight`` that it holds along ``dim``, in order."""

    stored: Stored
    weight: Weight
    spans: tuple[Span, ...]

    @property
    def dim(self) -> int:
        """The dimension along which the spans lie."""
        return cut_dim(self.weight)

    @property
    def num_rows(self) -> int:
        """Rows of bytes that lie one after the other; spans are ranges of columns of them."""
        return math.prod(self.stored.shape[: self.dim])

    @property
    def num_indices(self) -> int:
        """Indices along ``dim``."""
        return self.stored.shape[self.dim]

    @property
    def unit_bytes(self) -> int:
        """Bytes of one index along ``dim`` within one row."""
        return math.prod(self.stored.shape[self.dim + 1 :]) * self.stored.dtype.itemsize

    def blocks(self, indices: range, num_bytes: int) -> Iterator[tuple[range, range]]:
        """(rows, indices) that cover ``indices`` of every row in the order of the file, ``num_bytes`` at a time."""
        if self.num_rows == 1:
            step = max(1, num_bytes // self.unit_bytes)
            yield from ((range(1), indices[start : start + step]) for start in range(0, len(indices), step))
        else:
            step = max(1, num_bytes // (len(indices) * self.unit_bytes))
            rows = range(self.num_rows)
            yield from ((rows[start : start + step], indices) for start in range(0, len(rows), step))

    def positions(self) -> Iterator[tuple[int, Span]]:
        """Each span with its first index along ``dim`` of the stored tensor."""
        position = 0
        for span in self.spans:
            yield position, span
            position += span.length
        assert position == self.num_indices, self


@dataclass(frozen=True)
class Misfit:
    """What keeps a stored tensor, or a weight of the model, from having a view."""

    kind: Literal["missing", "shape", "dtype", "left over"]
    text: str
    """A full sentence with file, name and shapes."""
    weight: Weight | None = None
    """None for what is left over."""
    tp_rank: int = 0
    hf_name: str | None = None
    """Which of the weight's Hugging Face tensors, in a Hugging Face directory."""
    stored: Stored | None = None
    """The stored tensor; None if it is missing."""


def whole_views(
    weights: Iterable[Weight], tensors: Mapping[str, Stored], missing: Callable[[str, Shape], str],
    other_shape: Callable[[str, Shape, Stored], str],
) -> tuple[list[View], list[Misfit], list[str]]:
    """Views of ``weights`` in ``tensors`` (by Hugging Face name), the misfits, and the names that no weight has.

    ``missing`` makes the message for a tensor that is absent, from its name and the expected shape; ``other_shape`` the
    one for a tensor of another shape, from these two and the stored tensor.
    """
    left_over = dict.fromkeys(sorted(tensors))
    views: list[View] = []
    misfits: list[Misfit] = []
    for weight in weights:
        for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
            stored = tensors.get(name)
            left_over.pop(name, None)
            if stored is None:
                misfits.append(Misfit("missing", missing(name, shape), weight, hf_name=name))
            elif stored.shape != shape:
                text = other_shape(name, shape, stored)
                misfits.append(Misfit("shape", text, weight, hf_name=name, stored=stored))
            else:
                views.append(whole_view(stored, name, weight))
    return views, misfits, [*left_over]


def shard_view(stored: Stored, weight: Weight, tp_size: int, tp_rank: int) -> View:
    """The view of ``stored``, which holds one rank's shard of ``weight``."""
    return View(stored, weight, shard_spans(weight, tp_size, tp_rank))


def whole_view(stored: Stored, hf_name: str, weight: Weight) -> View:
    """The view of ``stored``, which holds the whole Hugging Face tensor ``hf_name`` of ``weight``."""
    return View(stored, weight, (Span(hf_name, 0, stored.shape[cut_dim(weight)]),))
