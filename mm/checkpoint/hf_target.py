"""New Hugging Face directories modelled on a base: which tensor goes into which file, and the other files."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from mm.checkpoint.hf import INDEX_FILE, SINGLE_FILE, HFDirectory, is_model_weights
from mm.checkpoint.hf_config import for_both_versions, stated_dtype, with_dtype
from mm.checkpoint.safetensors import safetensors_file, safetensors_file_like
from mm.config.model import ModelConfig
from mm.weights.table import model_weights
from mm.weights.views import TargetFile, View, dtype_name, whole_view

_SHARD_BYTES = 5_000_000_000
"""Size of a shard file if the base has no weights; transformers 4 used 5 GB as well."""
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".bin.index.json")

Dtypes = Mapping[str, torch.dtype]


def hf_targets(base: HFDirectory, model: ModelConfig, dtypes: Dtypes) -> tuple[list[View], list[TargetFile]]:
    """Views and files of a new directory: the shards of ``base`` if it has weights, else new ones.

    ``dtypes`` are the source's, by published name; a conversion keeps them.  A shard with the same dtypes as in the
    base gets a byte-identical header.
    """
    weights = {name: weight for weight in model_weights(model) for name in weight.hf_names}
    shapes = {name: shape for weight in weights.values()
              for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True)}
    views, files = [], []
    for shard, sources in _shards(base, model, dtypes):
        if base.tensors and all(base.contents[shard][name].dtype == dtypes[hf] for name, hf in sources.items()):
            file = safetensors_file_like(base.path / shard)
        else:
            file = safetensors_file(shard, [(name, dtypes[hf], shapes[hf]) for name, hf in sources.items()])
        files.append(file)
        views += [whole_view(stored, sources[stored.name], weights[sources[stored.name]]) for stored in file.tensors]
    return views, files


def _shards(base: HFDirectory, model: ModelConfig, dtypes: Dtypes) -> Iterator[tuple[str, dict[str, str]]]:
    """Each file with its tensor names, and the published name of the weight that each holds."""
    if base.tensors:
        by_file: dict[str, dict[str, str]] = {}
        names = model.family.weights
        for name, stored in base.tensors.items():
            # A tied model's redundant output layer is kept; it is the embedding.
            is_copy = model.language.tied and name == names.output_layer_weight
            by_file.setdefault(stored.file, {})[stored.name] = names.embedding_weight if is_copy else name
        yield from by_file.items()
        return
    shards, free_bytes = [{}], _SHARD_BYTES
    for weight in model_weights(model):
        for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
            num_bytes = torch.Size(shape).numel() * dtypes[name].itemsize
            if shards[-1] and num_bytes > free_bytes:
                shards.append({})
                free_bytes = _SHARD_BYTES
            shards[-1][name] = name
            free_bytes -= num_bytes
    for number, shard in enumerate(shards, start=1):
        yield SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors", shard


def is_hf_target(path: Path) -> bool:
    """Whether this is a Hugging Face directory, which a conversion to this format may replace."""
    return (path / "config.json").is_file()


def write_other_files(base: HFDirectory, folder: Path, files: Sequence[TargetFile]) -> None:
    """Write everything besides the weights ``files``: config.json, the index, and the base's other top-level files.

    Weights, pickles and hidden files are not copied.  config.json states the dtype of the weights, and gets the keys
    that transformers 4.57 or 5 would miss; if nothing changes, it is copied byte for byte.  The index is copied too if
    the tensors are the same; a new index keeps the base's other metadata.
    """
    for file in sorted(base.path.iterdir()):
        is_weights = is_model_weights(file.name) or file.name.endswith(_PICKLE_SUFFIXES)
        if file.is_file() and not is_weights and not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)
    is_like_base = {file.name: file.tensors for file in files} == {
        file: tuple(stored.values()) for file, stored in base.contents.items()}
    config, dtypes = base.config, [dtype_name(tensor.dtype) for file in files for tensor in file.tensors]
    if not is_like_base and stated_dtype(config) not in dtypes:
        config = with_dtype(config, dtypes[0])
    config = for_both_versions(config)
    if config != base.config:
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    index = folder / INDEX_FILE
    if is_like_base and base.index is not None:
        shutil.copyfile(base.path / INDEX_FILE, index)
    elif len(files) > 1 or base.index is not None:
        total_bytes = sum(tensor.num_bytes for file in files for tensor in file.tensors)
        metadata = (base.index or {}).get("metadata")
        metadata = {**(metadata if isinstance(metadata, dict) else {}), "total_size": total_bytes}
        weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
        text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
        index.write_text(text, encoding="utf-8")
