"""The manifest of a training checkpoint: every tensor with its file, shape and crc32, and the progress of the training.

``checkpoints.py`` finds checkpoints, ``training_writer.py`` writes and deletes them, ``training_reader.py`` reads them
for any layout.  ``mm.training`` decides which rank saves what.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError

from mm.config.model import ModelConfig
from mm.config.schema import Count, NaturalNumber
from mm.errors import UserError, refuse
from mm.formats.checkpoints import instead_of
from mm.formats.manifest import (
    MANIFEST_FILE,
    manifest_text,
    placed_model,
    read_manifest,
    tensor_from_json,
    tensor_json,
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

    @classmethod
    def from_json(cls, entry: Any, folder: Path) -> "CheckpointTensor":
        """A piece from its entry in the manifest in ``folder``; raises UserError for a damaged entry."""
        stated = tensor_from_json(entry, folder)
        kind, numbers = entry.get("part"), (entry.get("tp_rank"), entry.get("start"))
        if not isinstance(kind, str) or not all(type(one) is int and one >= 0 for one in numbers):
            raise UserError(f"{folder / MANIFEST_FILE} has a damaged entry of {stated.name}: part, tp_rank and start "
                            f"are {str((kind, *numbers))[:200]}; {instead_of(folder)}.")
        return cls(stated.name, kind, *numbers, dataclasses.replace(stated, name=_key(stated.name, kind)))

    def to_json(self) -> dict[str, Any]:
        return {
            **tensor_json(self.stored), "name": self.name, "part": self.kind, "tp_rank": self.tp_rank,
            "start": self.start,
        }  # fmt: skip


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of a checkpoint.  ``facts`` are for people and never read back."""

    iteration: NaturalNumber
    consumed_samples: NaturalNumber
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
        content, path = read_manifest(folder, FORMAT, VERSION, instead_of(folder)), folder / MANIFEST_FILE
        refuse(_field_problems(content, path))
        model = placed_model(content["model"], content["tp_size"], folder)
        pieces = tuple(CheckpointTensor.from_json(piece, folder) for piece in content["pieces"])
        outside = next((one.stored.file for one in pieces
                        if Path(one.stored.file).name != one.stored.file or not one.stored.file.isprintable()), None)
        if outside is not None:
            raise UserError(f"{path} names the file {outside!r}; expected plain file names beside it.")
        return cls(**content | {"model": model, "pieces": pieces})

    def text(self) -> str:
        """The content of the manifest file."""
        content = {"format": FORMAT, "version": VERSION, **vars(self), "model": dataclasses.asdict(self.model)}
        del content["pieces"]  # they come last, a line for each
        return manifest_text(content, "pieces", [piece.to_json() for piece in self.pieces])


def _field_problems(content: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Fields of the manifest at ``path`` that are unknown, missing or of another type."""
    kinds = get_type_hints(CheckpointManifest, include_extras=True) | {"model": Mapping[str, Any], "pieces": list[Any]}
    yield from (f"{path} has {name[:80]!r}, which this version does not know; use the version that wrote it."
                for name in content.keys() - kinds.keys())
    for field in dataclasses.fields(CheckpointManifest):
        if field.name not in content and field.default is dataclasses.MISSING:
            yield f"{path} has no {field.name}; {instead_of(path.parent)}."
        elif field.name in content:
            try:
                TypeAdapter(kinds[field.name]).validate_python(content[field.name], strict=True)
            except ValidationError:
                yield (f"{path}: {field.name} is {str(content[field.name])[:80]!r}, which no run writes; "
                       f"{instead_of(path.parent)}.")


def _key(name: str, kind: str) -> str:
    """The name of a piece in its safetensors file."""
    return name if kind == "weight" else f"{name}:{kind}"
