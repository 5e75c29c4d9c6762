"""A training checkpoint: its manifest, and reading it for any layout: weights as views, states as flat ranges.

``directories.py`` finds checkpoints, ``training_files.py`` writes and deletes them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm.checkpoint.directories import find_checkpoint, instead_of
from mm.checkpoint.manifest import MANIFEST_FILE, manifest_text, read_manifest, stated_tensor, tensor_json, validated
from mm.checkpoint.mindspeed_layout import Layout
from mm.checkpoint.safetensors import read_header
from mm.checkpoint.tensor_io import Files
from mm.config.model import ModelConfig
from mm.errors import UserError, collected, counted
from mm.weights.fuse import local_shape, shard, unshard
from mm.weights.shard import REMAINDER, joined
from mm.weights.table import Weight, placed, stored_name
from mm.weights.trained import saved_weights
from mm.weights.views import Stored, View, shard_view, share_numbers

FORMAT, VERSION = "mm training checkpoint", 1


@dataclass(frozen=True)
class CheckpointTensor:
    """A stored tensor: a weight of one tensor-parallel rank, or a flat range of a state of the same size."""

    name: str
    """Name of the weight, with the global layer number."""
    kind: str
    """"weight", "master" (its fp32 copy), "remainder" (what a bf16 weight lacks of that, ``mm.weights.shard``),
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
        return {**tensor_json(self.stored), "name": self.name, "part": self.kind, "tp_rank": self.tp_rank,
                "start": self.start}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "CheckpointTensor":
        name, kind = entry["name"], entry["part"]
        return cls(name, kind, entry["tp_rank"], entry["start"], stated_tensor(entry, _key(name, kind)))


def _key(name: str, kind: str) -> str:
    """The name of a piece in its safetensors file."""
    return name if kind == "weight" else f"{name}:{kind}"


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of a checkpoint.  ``facts`` are for people; what has a default is missing in older checkpoints."""

    iteration: int
    consumed_samples: int
    world_size: int
    tp_size: int
    pp_size: int
    model: ModelConfig
    """The model, on the layout of the run that saved it."""
    optimizer: Mapping[str, Any] | None
    """"step" and "grad_scaler" (or None); None if no optimizer state was saved."""
    facts: Mapping[str, Any]
    pieces: tuple[CheckpointTensor, ...]
    data: Mapping[str, Any] | None = None
    base: Mapping[str, Any] | None = None
    """For adapters: "path" and "crc32" of their base model, whose frozen weights are not saved here."""
    best: Mapping[str, Any] | None = None
    run_id: str | None = None
    """The same in all checkpoints that one run saves into one directory."""
    schedule: Mapping[str, Any] | None = None
    given_start: Mapping[str, str | None] | None = None
    """What the command that began the run said it starts from: ``Arguments.given_start``."""
    recent: Mapping[str, Any] | None = None
    disks: Sequence[Mapping[str, Any]] | None = None
    """With ``--save-on-each-node``, "host", "ranks" and "files" of each disk; None if all files are on one."""

    @classmethod
    def read(cls, folder: Path) -> "CheckpointManifest":
        """Read the manifest; raises UserError if it is missing, damaged or of another version."""
        cure = instead_of(folder)
        content = read_manifest(folder, FORMAT, VERSION, cure)
        content["model"] = validated(ModelConfig, content["model"], folder, "model", cure)
        content["pieces"] = tuple(map(CheckpointTensor.from_json, content["pieces"]))
        if unknown := content.keys() - {field.name for field in dataclasses.fields(cls)}:
            raise UserError(f"{folder / MANIFEST_FILE} holds {', '.join(sorted(unknown))}, which this version does not "
                            f"know; use the version that wrote it.")
        return cls(**content)

    def text(self) -> str:
        content = {"format": FORMAT, "version": VERSION, **vars(self), "model": dataclasses.asdict(self.model)}
        del content["pieces"]  # they come last, a line for each
        return manifest_text(content, "pieces", [piece.to_json() for piece in self.pieces])


@dataclass(frozen=True)
class TrainingDirectory:
    """One complete checkpoint, read for any layout; every byte that is read is verified."""

    path: Path
    manifest: CheckpointManifest
    notes: tuple[str, ...] = ()
    """Notes for the user on leftovers of an interrupted save."""

    @classmethod
    def open(cls, path: str | Path) -> "TrainingDirectory":
        """Open the checkpoint of ``find_checkpoint``; raises UserError if there is none or its manifest is damaged."""
        folder, notes = find_checkpoint(path)
        return cls(folder, CheckpointManifest.read(folder), notes)

    @cached_property
    def instead(self) -> str:
        """What to do about damage, which ends the messages about it."""
        return instead_of(self.path)

    @property
    def files(self) -> tuple[Path, ...]:
        """The manifest and all weight files."""
        names = {piece.stored.file for piece in self.manifest.pieces if piece.kind == "weight"}
        return self.path / MANIFEST_FILE, *(self.path / name for name in sorted(names))

    @property
    def stated(self) -> Sequence[Stored]:
        return [piece.stored for piece in self.manifest.pieces]

    @cached_property
    def contents(self) -> Mapping[str, Mapping[str, Stored]]:
        """Tensors by file and name, including those that the manifest does not list."""
        return {path.name: read_header(path) for path in sorted(self.path.glob("*.safetensors"))}

    def describe(self) -> list[str]:
        manifest = self.manifest
        return [*self.notes, f"{self.path}: training checkpoint, iteration {manifest.iteration}, "
                f"{counted(manifest.consumed_samples, 'sample')}",
                f"layout: {Layout.of(manifest.model, manifest.tp_size)}"]

    def views(self) -> tuple[list[View], list[str]]:
        """Views of all weights, and problems; files on other nodes' disks may be missing: see ``check_here``."""
        views: list[View] = []
        problems: list[str] = []
        for weight in saved_weights(self.manifest.model):
            for tp_rank in range(weight.shards(self.manifest.tp_size)[0]):
                pieces = self._pieces.get((weight.name, "weight", tp_rank))
                if not pieces:
                    problems.append(f"{self.path} lacks {weight.name} of tensor-parallel rank {tp_rank}; "
                                    f"{self.instead}.")
                    continue
                with collected(problems):
                    stored = pieces[0].stored if self._is_elsewhere(pieces[0]) else self._located(pieces[0])
                    # A parameter's shape may differ from the weight's, as for a flattened patch embedding.
                    shaped = dataclasses.replace(stored, shape=local_shape(weight, self.manifest.tp_size))
                    assert shaped.num_bytes == stored.num_bytes, weight.name
                    views.append(shard_view(shaped, weight, self.manifest.tp_size, tp_rank))
        return views, problems

    def has(self, weight: Weight, kind: str) -> bool:
        return all((stored_name(weight), one, 0) in self._pieces for one in self._kinds(weight, kind))

    def has_fp32(self, weight: Weight) -> bool:
        """Whether it holds the weight in fp32, in whatever form."""
        pieces = self._pieces.get((stored_name(weight), "weight", 0), ())
        return self.has(weight, "master") or any(piece.stored.dtype == torch.float32 for piece in pieces)

    def _kinds(self, weight: Weight, kind: str) -> tuple[str, ...]:
        """The kinds of pieces that hold ``kind``: an fp32 copy may be stored as the weight and its remainder."""
        is_joined = kind == "master" and (stored_name(weight), REMAINDER, 0) in self._pieces
        return ("weight", REMAINDER) if is_joined else (kind,)

    def read_state(self, weight: Weight, kind: str, tp_size: int, tp_rank: int, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened shard of one tensor-parallel rank: "master" or a moment."""
        if start == stop:
            return torch.empty(0)
        found = [self._read_kind(weight, one, tp_size, tp_rank, start, stop) for one in self._kinds(weight, kind)]
        return found[0] if len(found) == 1 else joined(*found)

    def _read_kind(self, weight: Weight, kind: str, tp_size: int, tp_rank: int, start: int, stop: int) -> Tensor:
        # Both depend on the tensor-parallel size and on whether the encoder is whole, when saved and now.
        own = weight.shards(tp_size, tp_rank)
        stored, _ = placed(weight, self.manifest.model).shards(self.manifest.tp_size)
        if own[0] == stored:
            return self._range(stored_name(weight), kind, own[1], start, stop)
        needed = [rank for rank in range(stored) if share_numbers(weight, (stored, rank), own)]
        plain = dataclasses.replace(weight, is_whole=False)
        shape = local_shape(plain, stored)
        found = {rank: self._range(stored_name(weight), kind, rank, 0, math.prod(shape)).reshape(shape)
                 for rank in needed}
        # Stands for the shards that this rank does not need; it takes no memory.
        pieces = self._pieces.get((stored_name(weight), kind, 0))
        nothing = torch.zeros((), dtype=pieces[0].stored.dtype if pieces else torch.float32).expand(shape)
        shards = [found.get(rank, nothing) for rank in range(stored)]
        return shard(plain, unshard(plain, shards), *own).reshape(-1)[start:stop]

    def check_here(self, files: Iterable[str]) -> None:
        """Raise UserError if one of ``files`` is only on the disk of another node (``--save-on-each-node``)."""
        disks, lacking = self.manifest.disks or (), sorted(set(files) - self._names)
        if disks and lacking:
            hosts = dict.fromkeys(disk["host"] for disk in disks if not self._names.issuperset(disk["files"]))
            path = self.path.resolve()
            raise UserError(f"{self.path} lacks {lacking[0]}: each node saved on its own disk (--save-on-each-node). "
                            f"To copy what is missing: `for node in {' '.join(hosts)}; do rsync -a $node:{path}/ "
                            f"{path}/; done`")

    def read_random(self, name: str) -> Tensor | None:
        """A random state; None if it was not saved."""
        pieces = self._pieces.get((name, "random", 0))
        return self._tensor(pieces[0]) if pieces else None

    @cached_property
    def _pieces(self) -> Mapping[tuple[str, str, int], Sequence[CheckpointTensor]]:
        found: dict[tuple[str, str, int], list[CheckpointTensor]] = {}
        for piece in sorted(self.manifest.pieces, key=lambda piece: (self._is_elsewhere(piece), piece.start)):
            found.setdefault((piece.name, piece.kind, piece.tp_rank), []).append(piece)
        return found

    @cached_property
    def _header(self) -> Callable[[str], Mapping[str, Stored]]:
        """The tensors of a file.  Headers are read when first needed, because a rank reads few of the files."""
        return cache(lambda file: read_header(self.path / file))

    def _located(self, piece: CheckpointTensor) -> Stored:
        """The piece's entry in its file, with the manifest's checksum."""
        stated, path = piece.stored, self.path / piece.stored.file
        self.check_here([stated.file])
        try:
            found = self._header(stated.file).get(stated.name)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); {self.instead}.") from error
        if found is None or (found.shape, found.dtype) != (stated.shape, stated.dtype):
            raise UserError(f"{path}: {stated.name} differs from {MANIFEST_FILE}; {self.instead}.")
        return dataclasses.replace(found, crc32=stated.crc32)

    def _is_elsewhere(self, piece: CheckpointTensor) -> bool:
        """Whether a piece is in a file that another node has written to its own disk, and that was not copied here."""
        return bool(self.manifest.disks) and piece.stored.file not in self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(path.name for path in self.path.iterdir())

    def _range(self, name: str, kind: str, tp_rank: int, start: int, stop: int) -> Tensor:
        found, position = list[Tensor](), start
        for piece in self._pieces.get((name, kind, tp_rank), ()):
            if piece.start <= position < (end := min(piece.stop, stop)):
                found.append(self._tensor(piece)[position - piece.start : end - piece.start])
                position = end
        if position != stop:
            raise UserError(f"{self.path} lacks elements {position} to {stop} of {kind} of {name} (tensor-parallel "
                            f"rank {tp_rank} of {self.manifest.tp_size}); {self.instead}.")
        return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0)

    def _tensor(self, piece: CheckpointTensor) -> Tensor:
        stored = self._located(piece)
        with Files(self.path) as files:
            return torch.frombuffer(files.read_checked(stored, self.instead), dtype=stored.dtype)
