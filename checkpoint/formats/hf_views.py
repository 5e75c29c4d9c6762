"""A Hugging Face directory as the source or the target of a byte plan.

Finding and checking its files is ``checkpoint.formats.hf``'s; the names and shapes are the weight table's.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from checkpoint.formats.hf import HFDirectory, planned_shards
from checkpoint.formats.hf_files import HFTensor
from checkpoint.formats.safetensors_file import SafetensorsFile
from mm.config.model import ModelConfig
from mm.weights.table import model_weights
from mm.weights.views import Stored, View, whole_view


def hf_sources(directory: HFDirectory, model: ModelConfig) -> list[View]:
    """Views of all weights in ``directory``.

    Raises:
        UserError: naming each tensor that is missing, has another shape or belongs to nothing.
    """
    directory.check(model)
    return [
        whole_view(_stored(directory.tensors[name]), name, weight)
        for weight in model_weights(model)
        for name in weight.hf_names
    ]


def hf_targets(
    base: HFDirectory, model: ModelConfig, dtypes: dict[str, torch.dtype]
) -> tuple[list[View], list[SafetensorsFile]]:
    """Views and files of a new directory like ``base``: its shards to the byte where it has weights, else new ones.

    ``dtypes`` are the source's, by published name.
    """
    weights = {name: weight for weight in model_weights(model) for name in weight.hf_names}
    views, files = [], []
    shards = planned_shards(base, model, None if base.tensors else next(iter(dtypes.values())))
    for shard, outputs in shards.items():
        if base.tensors:
            file = SafetensorsFile.like(base.path / shard)
        else:
            shapes = {name: shape for weight in weights.values()
                      for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True)}
            file = SafetensorsFile.new(shard, [(o.key, dtypes[o.source], shapes[o.source]) for o in outputs])
        stored = {tensor.name: tensor for tensor in file.tensors}
        views += [whole_view(stored[output.key], output.source, weights[output.source]) for output in outputs]
        files.append(file)
    return views, files


def fingerprint(directory: Path, files: Iterator[Path] | list[Path]) -> str:
    """Tells two versions of the same files apart without reading their weights: sizes, headers, times of change."""
    digest = hashlib.sha256()
    for path in sorted(files):
        state = path.stat()
        digest.update(f"{os.path.relpath(path, directory)} {state.st_size} {state.st_mtime_ns}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(65536))
    return digest.hexdigest()


def _stored(tensor: HFTensor) -> Stored:
    return Stored(tensor.file.name, tensor.name, tensor.dtype, tensor.shape, tensor.offset)
