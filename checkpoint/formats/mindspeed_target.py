"""A directory in MindSpeed-MM's layout as the target of a byte plan: its files, and the views of their tensors."""

from collections.abc import Mapping

import torch

from checkpoint.formats.safetensors import SafetensorsFile
from checkpoint.formats.storage import RELEASE, Format, RankFile, Storage, rank_files
from checkpoint.formats.torch_file_writer import Tensors, TorchFile
from mm.config.model import ModelConfig
from mm.weights.plan import TargetFile
from mm.weights.table import local_shape
from mm.weights.views import View, shard_view


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


def _torch_file(name: str, parts: list[RankFile], described: Tensors) -> TorchFile:
    return TorchFile.new(name, {
        part.chunk_key: {key.removeprefix(f"{part.chunk_key}/"): described[key] for key in part.weights}
        for part in parts
    })
