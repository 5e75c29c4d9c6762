"""A directory in MindSpeed-MM's layout as the target of a byte plan: its files, and the views of their tensors."""

from collections.abc import Mapping

import torch

from checkpoint.formats.safetensors_file import SafetensorsFile
from checkpoint.formats.slots import RELEASE, Format, Kind, Shard, shards
from checkpoint.formats.torch_file_writer import Tensors, TorchFile
from mm.config.model import ModelConfig
from mm.weights.plan import TargetFile
from mm.weights.table import Weight, local_shape
from mm.weights.views import Stored, View, shard_view


def mm_targets(
    model: ModelConfig, tp_size: int, kind: Kind, dtypes: Mapping[str, torch.dtype]
) -> tuple[list[View], list[TargetFile]]:
    """Views and files of ``model`` on its layout; ``dtypes`` are the source's, by published Hugging Face name."""
    by_file: dict[str, list[Shard]] = {}
    for shard in shards(model, tp_size, kind):
        by_file.setdefault(f"{RELEASE}/{shard.file}", []).append(shard)
    views, files = [], []
    for name, parts in by_file.items():
        owned = {key: (weight, shard.tp_rank) for shard in parts for key, weight in shard.weights.items()}
        described = {
            key: (dtypes[weight.hf_names[0]], local_shape(weight, tp_size)) for key, (weight, _) in owned.items()
        }
        file = _torch_file(name, parts, described) if kind.format is Format.TORCH else SafetensorsFile.new(
            name, [(key, *spec) for key, spec in described.items()])
        files.append(file)
        views += [_view(stored, *owned[stored.name], tp_size) for stored in file.tensors]
    return views, files


def _torch_file(name: str, parts: list[Shard], described: Tensors) -> TorchFile:
    return TorchFile.new(name, {
        shard.chunk_key: {key.removeprefix(f"{shard.chunk_key}/"): described[key] for key in shard.weights}
        for shard in parts
    })


def _view(stored: Stored, weight: Weight, tp_rank: int, tp_size: int) -> View:
    return shard_view(stored, weight, tp_size, tp_rank)
