"""Reads the weights of a directory in MindSpeed-MM's layout as any other layout needs them, one weight at a time.

Knows nothing of processes or devices.
"""

import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.formats.files import DTYPE_NAMES
from checkpoint.formats.mindspeed import MMDirectory
from checkpoint.formats.training import MANIFEST_FILE
from checkpoint.formats.training_reader import check_stored_model
from mm.config.model import ModelConfig
from mm.errors import UserError
from mm.weights.cut import cut_dim
from mm.weights.table import Weight, local_shape
from mm.weights.views import ModelRun, Stored, View, model_runs

BLOCK_BYTES = 1 << 26
"""How much of a tensor is read at once: what reading takes beside the weight itself."""


@dataclass(frozen=True)
class _Piece:
    """``run`` of the model lies at ``position`` of the view, along the dimension that is cut."""

    view: View
    position: int
    run: ModelRun


@dataclass(frozen=True)
class _Move:
    """``length`` indices from ``source`` of a stored tensor on belong to ``target`` of a shard on."""

    source: int
    target: int
    length: int


class MMReader:
    """The weights of one model; every tensor that is read is compared with the manifest, if there is one."""

    def __init__(self, directory: MMDirectory, model: ModelConfig, block_bytes: int = BLOCK_BYTES) -> None:
        """``model`` is the one to be filled, on any layout.

        Raises:
            UserError: the directory is incomplete or of another model.
        """
        self.directory, self._block_bytes = directory, block_bytes
        placed, tp_size = directory.placed_model(None, "--load", model)
        check_stored_model(directory.path, placed, model)
        views = directory.views(placed, tp_size)
        self._crc32s = _checked_crc32s(directory, views)
        self._pieces: dict[str, list[_Piece]] = {}
        self._copies: list[tuple[Stored, Stored]] = []
        self._only_padding: list[Stored] = []
        first: dict[tuple[ModelRun, ...], Stored] = {}
        for view in views:
            if all(run.key is None for run in view.runs):
                self._only_padding.append(view.stored)
                continue
            kept = first.setdefault(view.runs, view.stored)
            if kept is not view.stored:
                self._copies.append((kept, view.stored))
                continue
            for piece in _pieces(view):
                if piece.run.key is not None:
                    self._pieces.setdefault(piece.run.key, []).append(piece)
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece.run.start)

    @classmethod
    def open(cls, path: str | Path, model: ModelConfig, finetune: bool) -> "MMReader":
        """What ``--load`` gives; only headers are read.

        Raises:
            UserError: it is incomplete or of another model, or it was trained and ``finetune`` does not say to begin
                anew.
        """
        directory = MMDirectory.open(path)
        if directory.is_trained and not finetune:
            raise UserError(
                f"--load {path} is a training checkpoint of MindSpeed-MM ({directory.folder}), whose optimizer state "
                f"and random states cannot be continued here; add --finetune to start at step 0 from its weights."
            )
        if directory.kind.vit_only:
            raise UserError(f"--load {path} holds no LLM (it was made with save_vit_only); give a whole model.")
        return cls(directory, model)

    def check_unread(self) -> None:
        """Make sure of what no rank reads: that copies are alike, and ranks that hold nothing but padding hold zeros.

        With a manifest there is nothing to do: whoever wrote it has made sure.

        Raises:
            UserError: naming each tensor that is not as it should be.
        """
        if self._crc32s:
            return
        problems = [
            f"{self.directory.path / other.file}: {other.name} differs from the one in "
            f"{self.directory.path / one.file}, of which it should be a copy; one of the files is damaged."
            for one, other in self._copies
            if not self._are_equal(one, other)
        ]
        problems += [
            self._padding_problem(stored)
            for stored in self._only_padding
            if any(block.any() for _, block in self._blocks(stored))
        ]
        if problems:
            raise UserError(problems)

    def read(self, weight: Weight, tp_size: int, tp_rank: int, dtype: torch.dtype) -> Tensor:
        """One tensor-parallel rank's shard of ``weight``, padded, as ``dtype``.

        Raises:
            UserError: a tensor is damaged; the message names it and its file.
        """
        shard, dim = torch.zeros(local_shape(weight, tp_size), dtype=dtype), cut_dim(weight)
        for view, moves in self._needed(weight, tp_size, tp_rank):
            padding = [piece for piece in _pieces(view) if piece.run.key is None]
            for row, block in self._blocks(view.stored):
                first = row if dim == 0 else 0  # of the block, along ``dim``
                for piece in padding:
                    if _part(block, dim, first, piece.position, piece.run.length).any():
                        raise UserError(self._padding_problem(view.stored))
                rows = shard if dim == 0 else shard.narrow(0, row, len(block))
                for move in moves:
                    part = _part(block, dim, first, move.source, move.length)
                    start = move.target + max(first - move.source, 0)
                    if part.numel():
                        rows.narrow(dim, start, part.shape[dim]).copy_(part)
        return shard

    def _needed(self, weight: Weight, tp_size: int, tp_rank: int) -> list[tuple[View, list[_Move]]]:
        """What of which stored tensors one rank's shard is made of."""
        found: dict[Stored, tuple[View, list[_Move]]] = {}
        filled = 0
        for run in model_runs(weight, tp_size, tp_rank):
            reached, stop = run.start, run.start + run.length
            for piece in self._pieces[run.key] if run.key is not None else ():
                held = piece.run
                end = min(held.start + held.length, stop)
                if held.start <= reached < end:
                    _, moves = found.setdefault(piece.view.stored, (piece.view, []))
                    source, target = piece.position + reached - held.start, filled + reached - run.start
                    moves.append(_Move(source, target, end - reached))
                    reached = end
            assert run.key is None or reached == stop, (weight.name, run)
            filled += run.length
        return list(found.values())

    def _are_equal(self, one: Stored, other: Stored) -> bool:
        """Whether dtype and bytes are equal; the shapes are."""
        if one.dtype != other.dtype:
            return False
        both = zip(self._blocks(one), self._blocks(other), strict=True)
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for (_, a), (_, b) in both)

    def _padding_problem(self, stored: Stored) -> str:
        return (
            f"{self.directory.path / stored.file}: the padding of {stored.name} is not zero, so it is no padding; the "
            f"file is damaged or was cut for another TP size."
        )

    def _blocks(self, stored: Stored) -> Iterator[tuple[int, Tensor]]:
        """All of a tensor as (first row, next rows), where a row is what one index of the first dimension holds.

        A block is only valid until the next is asked for.  The checksum is known, and refused, after the last.
        """
        path, (num_rows, *rest) = self.directory.path / stored.file, stored.shape
        row_bytes = math.prod(rest) * stored.dtype.itemsize
        step = max(1, min(self._block_bytes // row_bytes, num_rows))
        crc32, expected = 0, self._crc32s.get((stored.file, stored.name))
        buffer = bytearray(step * row_bytes)
        with path.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            for row in range(0, num_rows, step):
                size = min(step, num_rows - row)
                content = memoryview(buffer)[: size * row_bytes]
                if not _fill(file.fileno(), content):
                    raise UserError(f"{path} ends within {stored.name}; it became shorter while it was read.")
                if expected is not None:
                    crc32 = zlib.crc32(content, crc32)
                yield row, torch.frombuffer(content, dtype=stored.dtype).reshape(size, *rest)
        if expected is not None and crc32 != expected:
            raise UserError(
                f"{path}: {stored.name} is damaged (its crc32 differs from {MANIFEST_FILE}); convert again."
            )


def _checked_crc32s(directory: MMDirectory, views: list[View]) -> dict[tuple[str, str], int]:
    """By file and tensor, as the manifest has them; empty without one.

    Raises:
        UserError: naming each tensor that is no weight, or not as the manifest says.
    """
    entries = {(entry.file, entry.name): entry for entry in directory.manifest.tensors} if directory.manifest else {}
    problems = []
    for stored in (view.stored for view in views):
        entry, dtype = entries.get((stored.file, stored.name)), DTYPE_NAMES.get(stored.dtype, str(stored.dtype))
        where = f"{directory.path / stored.file}: {stored.name} is {dtype}"
        if not stored.dtype.is_floating_point:
            problems.append(f"{where}; expected floating-point numbers.")
        elif entries and (entry is None or entry.dtype != dtype):
            says = f"says {entry.dtype}" if entry else "does not name it"
            problems.append(f"{where}, but {MANIFEST_FILE} {says}; convert again.")
    if problems:
        raise UserError(problems)
    return {key: entry.crc32 for key, entry in entries.items()}


def _pieces(view: View) -> Iterator[_Piece]:
    position = 0
    for run in view.runs:
        yield _Piece(view, position, run)
        position += run.length


def _part(block: Tensor, dim: int, first: int, start: int, length: int) -> Tensor:
    """What of the indices from ``start`` on lies in ``block``, which begins at ``first``; empty if nothing does."""
    begin, end = max(start - first, 0), min(start + length - first, block.shape[dim])
    return block.narrow(dim, min(begin, block.shape[dim]), max(end - begin, 0))


def _fill(descriptor: int, content: memoryview) -> bool:
    """Whether the file had as many bytes left; one call reads 2 GiB at most."""
    done = 0
    while done < len(content):
        num_bytes = os.readv(descriptor, [content[done:]])
        if num_bytes == 0:
            return False
        done += num_bytes
    return True
