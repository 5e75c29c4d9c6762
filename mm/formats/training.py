"""The manifest of a training checkpoint: every tensor with its file, shape and crc32, and the progress of the training.

``checkpoints.py`` finds checkpoints, ``training_writer.py`` writes and deletes them, ``training_reader.py`` reads them
for any layout.  ``mm.training`` decides which rank saves what.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic.dataclasses
import torch
from annotated_types import Len
from pydantic import Field
from typing_extensions import TypedDict

from mm.config.model import ModelConfig
from mm.config.schema import STRICT, Count, Number
from mm.formats.checkpoints import instead_of
from mm.formats.manifest import (
    Crc32,
    Natural,
    TensorEntry,
    check_placed,
    manifest_text,
    read_manifest,
    tensor_json,
    validated,
)
from mm.weights.views import Stored

FORMAT, VERSION = "mm training checkpoint", 1


@dataclass(frozen=True)
class CheckpointTensor:
    """A stored tensor: a weight of one tensor-parallel rank, or a flat range of a state of the same size."""

    name: str
    """Name of the weight, with the global layer number."""
    kind: str
    """"weight", "master" (its fp32 copy), "remainder" (what a bf16 weight lacks of that, ``mm.weights.halves``),
    "exp_avg", "exp_avg_sq", or "random" (a random state, not of a weight)."""
    tp_rank: int
    """0 for tensors that are equal on all tensor-parallel ranks and therefore stored once."""
    start: int
    """Index of the first element in the rank's flattened shard, without padding (``local_shape``)."""
    stored: Stored

    @classmethod
    def of(
        cls, dtype: torch.dtype, shape: Sequence[int], file: str, name: str, kind: str, tp_rank: int = 0, start: int = 0
    ) -> "CheckpointTensor":
        """A piece to be written; its checksum is computed then."""
        return cls(name, kind, tp_rank, start, Stored(file, _key(name, kind), dtype, tuple(shape), 0))

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.stored.shape)

    def to_json(self) -> dict[str, Any]:
        return {
            **tensor_json(self.stored), "name": self.name, "part": self.kind, "tp_rank": self.tp_rank,
            "start": self.start,
        }  # fmt: skip


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of a checkpoint.  ``facts`` are for people and never read back."""

    iteration: Natural
    consumed_samples: Natural
    world_size: Count
    tp_size: Count
    pp_size: Count
    model: ModelConfig
    """The model, on the layout of the run that saved it."""
    optimizer: Mapping[str, Any] | None
    """"step" and "grad_scaler" (or None); None if no optimizer state was saved."""
    facts: Mapping[str, Any]
    pieces: tuple[CheckpointTensor, ...]
    data: Mapping[str, Any] | None = None
    """The samples it was trained on; None if an older version saved it."""
    base: Mapping[str, Any] | None = None
    """For adapters: "path" and "crc32" of their base model, whose frozen weights are not saved here."""
    best: Mapping[str, Any] | None = None
    """The best validation so far; None in checkpoints from versions without it."""
    run_id: str | None = None
    """The same in all checkpoints that one run saves into one directory; None if an older version saved it."""
    schedule: Mapping[str, Any] | None = None
    """The schedule of learning rates and weight decay; None if an older version saved it."""
    given_start: Mapping[str, str | None] | None = None
    """What the command that began the run said it starts from: ``Arguments.given_start``."""
    recent: Mapping[str, Any] | None = None
    """Losses and gradient norms of the latest steps; None if an older version saved it."""
    disks: Sequence[Mapping[str, Any]] | None = None
    """With ``--save-on-each-node``, "host", "ranks" and "files" of each disk; None if all files are on one."""

    @classmethod
    def read(cls, folder: Path) -> "CheckpointManifest":
        """Read the manifest; raises UserError if it is missing, damaged or of another version."""
        cure = instead_of(folder)
        stated = validated(_Stated, read_manifest(folder, FORMAT, VERSION, cure), folder, cure=cure)
        check_placed(stated.model, stated.tp_size, folder)
        pieces: Any = tuple(piece.tensor for piece in stated.pieces)
        return cls(**vars(stated) | {"pieces": pieces})

    def text(self) -> str:
        """The content of the manifest file."""
        content = {"format": FORMAT, "version": VERSION, **vars(self), "model": dataclasses.asdict(self.model)}
        del content["pieces"]  # they come last, a line for each
        return manifest_text(content, "pieces", [piece.to_json() for piece in self.pieces])


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class _Piece(TensorEntry):
    """The entry of a ``CheckpointTensor``; its file is beside the manifest."""

    part: str
    tp_rank: Natural
    start: Natural
    file: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]

    @property
    def tensor(self) -> CheckpointTensor:
        stored = self.stored(_key(self.name, self.part))
        return CheckpointTensor(self.name, self.part, self.tp_rank, self.start, stored)


class _Scaler(TypedDict):
    scale: Number
    growth_tracker: Number
    hysteresis_tracker: Number


class _Optimizer(TypedDict):
    step: Natural
    grad_scaler: _Scaler | None


class _Base(TypedDict):
    path: str
    crc32: Crc32


class _Disk(TypedDict):
    host: str
    ranks: Annotated[Sequence[Natural], Len(1)]
    files: Sequence[str]


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class _Stated(CheckpointManifest):
    """The content of the file."""

    optimizer: _Optimizer | None
    pieces: tuple[_Piece, ...]  # pyright: ignore[reportIncompatibleVariableOverride]  (their form in JSON)
    base: _Base | None = None
    disks: Sequence[_Disk] | None = None


def _key(name: str, kind: str) -> str:
    """The name of a piece in its safetensors file."""
    return name if kind == "weight" else f"{name}:{kind}"
