"""Hugging Face directories: finds and checks their files, describes them as views, and lays out new ones.

Only headers are read.  Names and shapes come from ``mm.weights.table``.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mm.checkpoint.hf_config import (
    for_both_versions,
    hf_problems,
    language_keys,
    model_from_hf,
    stated_dtype,
    stated_family,
    with_dtype,
)
from mm.checkpoint.mindspeed_layout import Layout
from mm.checkpoint.safetensors import (
    FLOAT_DTYPES,
    read_header,
    refuse_lfs_pointer,
    safetensors_file,
    safetensors_file_like,
)
from mm.config.model import ModelConfig
from mm.errors import UserError, refuse
from mm.families import FAMILIES
from mm.files import json_object
from mm.weights.table import model_weights, published_name
from mm.weights.views import Stored, TargetFile, View, dtype_name, whole_view, whole_views

HF_CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class HFDirectory:
    """A Hugging Face directory whose files are complete and consistent."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    """By published name, in the order of the files."""
    index: Mapping[str, Any] | None
    """The parsed index; None for a single file."""
    config_bytes: bytes
    """``config.json`` as it was read."""

    @classmethod
    def open(cls, path: str | Path, weights_required: bool = True) -> "HFDirectory":
        """Find and check config and shards; without ``weights_required``, there may be no shards."""
        directory = Path(path)
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory; expected a Hugging Face model directory.")
        files = sorted(os.listdir(directory))
        has_weights = any(is_model_weights(name) for name in files)
        if not has_weights and any(map(is_adapter_file, files)):
            raise UserError(f"{directory} holds a LoRA adapter, not a model; give the directory of its base model "
                            f"(adapter_config.json: base_model_name_or_path).")
        config, config_bytes = _read_config(directory)
        stated_family(config, directory / HF_CONFIG_FILE)
        if "quantization_config" in config:
            raise UserError(f"{directory / HF_CONFIG_FILE} has a quantization_config: quantized weights can be neither "
                            f"trained nor converted; give the unquantized model.")
        if not (has_weights or weights_required or any(name.endswith(".bin") for name in files)):
            return cls(directory, config, {}, None, config_bytes)
        return cls(directory, config, *_read_tensors(directory), config_bytes)

    @property
    def files(self) -> tuple[Path, ...]:
        """config.json and all weight files."""
        return self.path / HF_CONFIG_FILE, *(self.path / file for file in self.contents)

    @cached_property
    def contents(self) -> Mapping[str, Mapping[str, Stored]]:
        """Tensors by file and name."""
        found: dict[str, dict[str, Stored]] = {}
        for stored in self.tensors.values():
            found.setdefault(stored.file, {})[stored.name] = stored
        return {file: found[file] for file in sorted(found)}

    def describe(self) -> list[str]:
        """Lines for ``show``."""
        return [f"{self.path}: Hugging Face directory", f"layers: {Layout.of(self.model_config(), 1)}"]

    def model_config(self) -> ModelConfig:
        """The model that ``config.json`` describes, on one stage."""
        return model_from_hf(self.config, file=self.path / HF_CONFIG_FILE)

    def check(self, model: ModelConfig) -> None:
        """Check that config.json describes ``model``, and that the weights, if any, are exactly the model's."""
        self.check_config(model)
        refuse(self.views(model)[1] if self.tensors else ())

    def check_config(self, model: ModelConfig) -> None:
        """Raise UserError naming each setting in which config.json describes another model than ``model``."""
        refuse(hf_problems(model, self.path, "The model JSON", self.config_bytes))

    def views(self, model: ModelConfig, language_only: bool = False) -> tuple[list[View], list[str]]:
        """Views of all weights of ``model``, or of its LLM, and problems with tensors that do not fit.

        A tied model may have an output layer, which is then a copy of the embedding.
        """
        names = model.family.weights
        views, problems, left_over = whole_views(
            [weight for weight in model_weights(model) if weight.part == "language" or not language_only], self.tensors,
            lambda name, shape: f"{self.path} lacks the tensor {name} of shape {list(shape)}{output_layer_hint(name)}.",
            lambda _, shape, stored: (
                f"{self.path / stored.file}: {stored.name} has shape {list(stored.shape)}; the model needs "
                f"{list(shape)}. Give weights that match the model JSON."))
        for name in () if language_only else left_over:
            stored, embedding = self.tensors[name], self.tensors.get(names.embedding_weight)
            is_copy = model.language.tied and name == names.output_layer_weight
            if is_copy and embedding and (stored.shape, stored.dtype) == (embedding.shape, embedding.dtype):
                weight = next(view.weight for view in views if view.weight.hf_names == (names.embedding_weight,))
                views.append(whole_view(stored, names.embedding_weight, weight))
            else:
                problems.append(f"{self.path / stored.file} holds {stored.name}, which is not a weight of the model"
                                f"{output_layer_hint(name)}.")
        return views, problems


def output_layer_hint(name: str) -> str:
    """A hint on why an output layer may be missing or left over; empty for other names."""
    if published_name(name) in {family.weights.output_layer_weight for family in FAMILIES}:
        return (" (the model JSON's text_decoder.untie_embeddings_and_output_weights must be true exactly when the "
                "model has an output layer that differs from its embedding)")
    return ""


def language_views(path: str | Path, config: Mapping[str, Any], model: ModelConfig) -> tuple[list[View], list[Path]]:
    """Views and files of the LLM in ``path``, a text-only model or a whole one; paths are absolute.

    ``config`` is the config.json of the whole ``model``, and must state an LLM of the same size.
    """
    directory = Path(path).resolve()
    found, config_bytes = _read_config(directory)
    expected, actual = (one.get("text_config") or one for one in (config, found))
    refuse(f"{directory / HF_CONFIG_FILE}: {key} is {actual.get(key)}, but the whole model has {expected.get(key)}; "
           f"give an LLM of the same size." for key in language_keys(model.family)
           if actual.get(key) != expected.get(key))
    tensors, index = _read_tensors(directory)
    located = {name: replace(stored, file=str(directory / stored.file)) for name, stored in tensors.items()}
    language = HFDirectory(directory, found, located, index, config_bytes)
    views, problems = language.views(model, language_only=True)
    refuse(problems)
    return views, [directory / file for file in language.contents]


# Finding files


def _read_config(directory: Path) -> tuple[dict[str, Any], bytes]:
    """``config.json`` of a directory, parsed and as bytes."""
    path = directory / HF_CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a Hugging Face model directory with its config.json.")
    config_bytes = path.read_bytes()
    return _parsed(path, config_bytes), config_bytes


def is_model_weights(name: str) -> bool:
    """Whether a file of this name holds or lists weights of a model (not of an adapter)."""
    return name.endswith((".safetensors", ".safetensors.index.json")) and not is_adapter_file(name)


def is_adapter_file(name: str) -> bool:
    """Whether PEFT uses this name for a file of an adapter."""
    return name.startswith("adapter_")


def _find_shards(directory: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The parsed index (None for a single file) and the names of the shard files, all of which exist."""
    files = sorted(os.listdir(directory))
    if INDEX_FILE in files and SINGLE_FILE in files:
        raise UserError(f"{directory} holds both {INDEX_FILE} and {SINGLE_FILE}; remove the one that is out of date.")
    if SINGLE_FILE in files:
        return None, [SINGLE_FILE]
    if INDEX_FILE not in files:
        raise UserError(_no_weights(directory, files))
    path = directory / INDEX_FILE
    index = _parsed(path, path.read_bytes())
    weight_map = index.get("weight_map")
    is_map = isinstance(weight_map, dict) and all(isinstance(one, str) for one in weight_map.values())
    if not weight_map or not is_map:
        raise UserError(f"{path} has no 'weight_map' of tensor names to shard files; download it again.")
    shards = list(dict.fromkeys(weight_map.values()))
    if missing := [name for name in shards if name not in files]:
        raise UserError(f"{directory} lacks {len(missing)} of the {len(shards)} shards that {INDEX_FILE} lists: "
                        f"{', '.join(missing)}. The download was probably interrupted; finish it.")
    return index, shards


def _no_weights(directory: Path, files: list[str]) -> str:
    shards = [name for name in files if is_model_weights(name)]
    if shards:
        return (f"{directory} holds {', '.join(shards)} but no {INDEX_FILE}; the download was probably interrupted. "
                f"Finish it, or rename a single complete file to {SINGLE_FILE}.")
    if any(name.endswith(".bin") for name in files):
        return (f"{directory} has weights only as a pickle, which can run code; convert it with transformers: "
                f"from_pretrained, then save_pretrained, which writes {SINGLE_FILE}.")
    return f"{directory} holds no weights; expected {SINGLE_FILE} or {INDEX_FILE} with its shards."


def _read_tensors(directory: Path) -> tuple[dict[str, Stored], Mapping[str, Any] | None]:
    """All tensors of the shards by published name, in file order, and the index, which must match them."""
    index, shards = _find_shards(directory)
    tensors: dict[str, Stored] = {}
    problems: list[str] = []
    for shard in shards:
        found = read_header(directory / shard, dtypes=FLOAT_DTYPES)
        if index is not None:
            listed = {name for name, file in index["weight_map"].items() if file == shard}
            if other := sorted(listed ^ found.keys()):
                problems.append(f"{directory / INDEX_FILE} and {shard} do not list the same tensors: only one has "
                                f"{', '.join(other[:5])}; download both again.")
        for tensor in found.values():
            twin = tensors.setdefault(published_name(tensor.name), tensor)
            if twin is not tensor:
                problems.append(f"{directory / tensor.file} holds {tensor.name} and {directory / twin.file} holds "
                                f"{twin.name}: the same weight twice. Remove one of them.")
    refuse(problems)
    return tensors, index


def _parsed(path: Path, raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``, the bytes of the file at ``path``."""
    refuse_lfs_pointer(path, raw)
    try:
        return json_object(raw)
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); download it again.") from error


# New directories, modelled on a base

_SHARD_BYTES = 5_000_000_000
"""Size of a shard file if the base has no weights; transformers 4 used 5 GB as well."""
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".bin.index.json")

Dtypes = Mapping[str, torch.dtype]


def hf_targets(base: HFDirectory, model: ModelConfig, dtypes: Dtypes) -> tuple[list[View], list[TargetFile]]:
    """Views and files of a new directory: the shards of ``base`` if it has weights, else new ones.

    ``dtypes`` are the source's, by published name.  A shard with the dtypes of the base gets the same header bytes.
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


def write_other_files(base: HFDirectory, folder: Path, files: Sequence[TargetFile]) -> None:
    """Write everything besides the weights ``files``: config.json, the index, and the base's other top-level files.

    Weights, pickles and hidden files are not copied.  config.json states the dtype of the weights, and gets the keys
    that transformers 4.57 or 5 would miss.  What does not change is copied byte for byte.
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
        (folder / HF_CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
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
