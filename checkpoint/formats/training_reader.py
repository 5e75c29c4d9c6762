"""Reads training checkpoints for any layout, and exports them to Hugging Face format.

Knows nothing of processes, devices or megatron: one process without them can read any checkpoint.
"""

import dataclasses
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint.formats.hf import write_hf
from checkpoint.formats.training import (
    DTYPES,
    MANIFEST_FILE,
    USE_ANOTHER,
    Piece,
    find_checkpoint,
    read_manifest,
    tensor_bytes,
)
from mm.config.model import ModelConfig
from mm.errors import UserError
from mm.weights.table import (
    EMBEDDING_NAME,
    HF_EMBEDDING_NAME,
    OUTPUT_LAYER_NAME,
    Weight,
    local_shape,
    shard,
    unshard,
)


def stored_name(weight: Weight) -> str:
    """Under which name the state of ``weight`` is stored: a tied output layer's is the embedding's."""
    is_copy = weight.name == OUTPUT_LAYER_NAME and weight.hf_names == (HF_EMBEDDING_NAME,)
    return EMBEDDING_NAME if is_copy else weight.name


class CheckpointReader:
    """Reads weights and optimizer state of one checkpoint as any layout needs them, checking every byte it reads."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError when the manifest is missing, damaged or of another version."""
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._pieces: dict[tuple[str, str, int], list[Piece]] = {}
        for piece in self.manifest.pieces:
            self._pieces.setdefault((piece.name, piece.part, piece.tp_rank), []).append(piece)
        self._files: dict[str, Any] = {}

    def has(self, weight: Weight, part: str) -> bool:
        return (stored_name(weight), part, 0) in self._pieces

    def read(
        self, weight: Weight, part: str, tp_size: int, tp_rank: int, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened shard of one tensor-parallel rank, on the host.

        Raises:
            UserError: something is missing or damaged; the message names file and tensor.
        """
        stop = math.prod(local_shape(weight, tp_size)) if stop is None else stop
        name, stored_size = stored_name(weight), self.manifest.tp_size
        if weight.tp_dim is None:
            return self._range(name, part, 0, start, stop)
        if tp_size == stored_size:
            return self._range(name, part, tp_rank, start, stop)
        shape = local_shape(weight, stored_size)
        shards = [self._range(name, part, rank, 0, math.prod(shape)).reshape(shape) for rank in range(stored_size)]
        return shard(weight, unshard(weight, shards), tp_size, tp_rank).reshape(-1)[start:stop]

    def read_random(self, name: str) -> Tensor | None:
        """A random state; None when it was not saved."""
        pieces = self._pieces.get((name, "random", 0))
        return self._tensor(pieces[0]) if pieces else None

    def _range(self, name: str, part: str, tp_rank: int, start: int, stop: int) -> Tensor:
        found, position = [], start
        for piece in sorted(self._pieces.get((name, part, tp_rank), ()), key=lambda piece: piece.start):
            if piece.start <= position < min(piece.stop, stop):
                end = min(piece.stop, stop)
                found.append(self._tensor(piece).reshape(-1)[position - piece.start : end - piece.start])
                position = end
        if position != stop:
            raise UserError(
                f"{self.folder} lacks elements {position} to {stop} of {part} of {name} (tensor-parallel rank "
                f"{tp_rank} of {self.manifest.tp_size}); the checkpoint is incomplete, use another one."
            )
        return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0)

    def _tensor(self, piece: Piece) -> Tensor:
        path = self.folder / piece.file
        try:
            if piece.file not in self._files:
                self._files[piece.file] = safe_open(path, framework="pt")
            tensor = self._files[piece.file].get_tensor(piece.key)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: {piece.key} cannot be read ({error}); {USE_ANOTHER}.") from error
        is_same = tuple(tensor.shape) == piece.shape and tensor.dtype == DTYPES[piece.dtype]
        if not is_same or zlib.crc32(tensor_bytes(tensor)) != piece.crc32:
            raise UserError(f"{path}: {piece.key} is damaged (its crc32 differs from {MANIFEST_FILE}); {USE_ANOTHER}.")
        return tensor


# The model that was saved

_JSON_NAMES = {
    "vision": "image_encoder.vision_encoder",
    "projector": "image_encoder.vision_projector",
    "language": "text_decoder",
    "image_token_id": "img_context_token_id",
}
_FREE_FIELDS = ("pipeline_num_layers", "freeze", "recompute", "init_method_std")
"""May differ between save and load: they do not change what a stored tensor means."""


def check_model(reader: CheckpointReader, model: ModelConfig) -> None:
    """Raise UserError with every field in which ``model`` differs from the model that was saved."""
    _check(reader.folder, reader.manifest.model, model)


def check_stored_model(where: Path, stored: ModelConfig, model: ModelConfig) -> None:
    """Raise UserError with every field in which ``model`` differs from ``stored``, as ``where`` was converted with.

    ``stored`` is from a config.json, which states a length of positions that changes nothing and that model JSON
    files state otherwise.
    """
    language = dataclasses.replace(
        stored.language, max_position_embeddings=model.language.max_position_embeddings)
    _check(where, _json(dataclasses.replace(stored, language=language)), model)


def _check(where: Path, stored_model: Mapping[str, Any], model: ModelConfig) -> None:
    stored, ours = _flat(stored_model), _flat(_json(model))
    problems = [
        f"{where}: the checkpoint was saved with {name} = {stored.get(name, 'absent')!r}, but the model JSON "
        f"says {ours.get(name, 'absent')!r}; give the model JSON that it was trained with."
        for name in sorted(stored.keys() | ours.keys())
        if stored.get(name, "absent") != ours.get(name, "absent")
    ]
    if problems:
        raise UserError(problems)


def _json(model: ModelConfig) -> Mapping[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(model)))


def _flat(model: Mapping[str, Any]) -> dict[str, Any]:
    fields = {}
    for name, value in model.items():
        if isinstance(value, Mapping):
            inner = {key: one for key, one in value.items() if key not in _FREE_FIELDS}
            fields |= {f"{_JSON_NAMES.get(name, name)}.{key}": one for key, one in inner.items()}
        else:
            fields[_JSON_NAMES.get(name, name)] = value
    return fields


# Export


def export_hf(
    checkpoint_dir: str | Path, base_hf_dir: str | Path, target_dir: str | Path, model: ModelConfig, overwrite: bool
) -> None:
    """Write the weights of a checkpoint, saved under any layout, as a Hugging Face directory like ``base_hf_dir``.

    ``checkpoint_dir`` is one checkpoint, or the directory of all of them (then the newest is taken).

    Raises:
        UserError: the checkpoint is incomplete, damaged or of another model, or ``write_hf`` refuses the target.
    """
    folder, _ = find_checkpoint(checkpoint_dir)
    reader = CheckpointReader(folder)
    check_model(reader, model)

    def whole(weight: Weight) -> Tensor:
        return reader.read(weight, "weight", 1, 0).reshape(weight.shape)

    write_hf(target_dir, base_hf_dir, model, whole, overwrite=overwrite)
