"""Tensors in files, and which part of which tensor of the model each one holds.

Pure: opens no file.  Whoever moves bytes, for a conversion or into a running model, is told by views what they are.
"""

import math
from dataclasses import dataclass

import torch

from mm.weights.cut import cut_dim, shard_runs
from mm.weights.table import Weight


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
    """Of its first byte in the file."""
    crc32: int | None = None
    """Checksum of its bytes, where a manifest states one."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ModelRun:
    """Neighbouring indices of one tensor of the model."""

    key: str | None
    """Which tensor: its published Hugging Face name; None for zero padding."""
    start: int
    length: int


@dataclass(frozen=True)
class View:
    """A stored tensor, and what of the model it holds along ``dim``, from its first index to its last."""

    stored: Stored
    dim: int
    runs: tuple[ModelRun, ...]

    @property
    def num_rows(self) -> int:
        """Rows of bytes that lie one after the other; runs are ranges of columns of them."""
        return math.prod(self.stored.shape[: self.dim])

    @property
    def unit_bytes(self) -> int:
        """Bytes of one index along ``dim`` within one row."""
        return math.prod(self.stored.shape[self.dim + 1 :]) * self.stored.dtype.itemsize


def model_runs(weight: Weight, tp_size: int, tp_rank: int) -> tuple[ModelRun, ...]:
    """What one tensor-parallel rank's shard of ``weight`` is made of."""
    return tuple(
        ModelRun(None if run.hf_index is None else weight.hf_names[run.hf_index], run.start, run.length)
        for run in shard_runs(weight, tp_size, tp_rank)
    )


def shard_view(stored: Stored, weight: Weight, tp_size: int, tp_rank: int) -> View:
    """The view of ``stored``, which holds one rank's shard of ``weight``."""
    return View(stored, cut_dim(weight), model_runs(weight, tp_size, tp_rank))


def whole_view(stored: Stored, hf_name: str, weight: Weight) -> View:
    """The view of ``stored``, which holds the whole Hugging Face tensor ``hf_name`` of ``weight``."""
    dim = cut_dim(weight)
    return View(stored, dim, (ModelRun(hf_name, 0, stored.shape[dim]),))
