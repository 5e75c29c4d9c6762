"""A directory in MindSpeed-MM's layout as the target of a byte plan: its files, and the views of their tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from checkpoint.formats import torch_file_writer as torch_zip_writer
from checkpoint.formats.safetensors import SafetensorsFile
from checkpoint.formats.storage import RELEASE, Format, RankFile, Storage, rank_files
from checkpoint.formats.torch_file import TorchFile
from checkpoint.formats.torch_file_writer import Tensors
from mm.config.model import ModelConfig
from mm.weights.plan import TargetFile
from mm.weights.table import local_shape
from mm.weights.views import Stored, View, shard_view


@dataclass(frozen=True)
class TorchTarget:
    """A ``model_optim_rng.pt`` to write: a ``mm.weights.plan.TargetFile``."""

    name: str
    chunks: Mapping[str, Tensors]
    """dtype and shape by name, by chunk key."""

    @cached_property
    def _planned(self) -> TorchFile:
        return torch_zip_writer.plan_file(self.chunks)

    @property
    def num_bytes(self) -> int:
        return self._planned.size_bytes

    @cached_property
    def tensors(self) -> tuple[Stored, ...]:
        return tuple(
            Stored(self.name, f"{tensor.chunk}/{tensor.name}", tensor.dtype, tensor.shape, tensor.offset_bytes)
            for tensor in self._planned.tensors
        )

    def frame(self, crc32s: Mapping[str, int]) -> Iterable[tuple[int, bytes]]:
        by_chunk = {(chunk, name): crc32s[f"{chunk}/{name}"] for chunk, names in self.chunks.items() for name in names}
        return torch_zip_writer.frame(self.chunks, crc32s=by_chunk)


def mindspeed_targets(
    model: ModelConfig, tp_size: int, storage: Storage, dtypes: Mapping[str, torch.dtype]
) -> tuple[list[View], list[TargetFile]]:
    """Views and files of ``model`` on its layout; ``dtypes`` are the source's, by published Hugging Face name."""
    by_file: dict[str, list[RankFile]] = {}
    for part in rank_files(model, tp_size, storage):
        by_file.setdefault(f"{RELEASE}/{part.file}", []).append(part)
    views, files = [], []
    for name, parts in by_file.items():
        owned = {key: (weight, part.tp_rank) for part in parts for key, weight in part.weights.items()}
        described = {
            key: (dtypes[weight.hf_names[0]], local_shape(weight, tp_size)) for key, (weight, _) in owned.items()
        }
        file = _torch_file(name, parts, described) if storage.format is Format.TORCH else SafetensorsFile.new(
            name, [(key, *spec) for key, spec in described.items()])
        files.append(file)
        for stored in file.tensors:
            weight, tp_rank = owned[stored.name]
            views.append(shard_view(stored, weight, tp_size, tp_rank))
    return views, files


def _torch_file(name: str, parts: list[RankFile], described: Tensors) -> TorchTarget:
    return TorchTarget(name, {
        part.chunk_key: {key.removeprefix(f"{part.chunk_key}/"): described[key] for key in part.weights}
        for part in parts
    })
