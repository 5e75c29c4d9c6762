"""Hugging Face directories as a source of weights: finds and checks their files, and describes them as views.

Only headers are read.  Names and shapes come from ``mm.weights.table``.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mm.config.model import ModelConfig
from mm.errors import UserError, refuse, refuse_special
from mm.families.known import FAMILIES
from mm.files import json_value
from mm.formats.hf_config import hf_problems, language_keys, model_from_hf, stated_family
from mm.formats.layout import Layout
from mm.formats.safetensors import FLOAT_DTYPES, read_header, refuse_lfs_pointer
from mm.weights.names import LIVE_STARTS, published_name
from mm.weights.table import model_weights
from mm.weights.views import Misfit, Stored, View, whole_view, whole_views

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def are_module_names(names: Iterable[str]) -> bool:
    """Whether Hugging Face names are spelled as in the live module; raises UserError if both spellings occur."""
    examples = {published_name(name) != name: name for name in names
                if name.startswith(tuple(LIVE_STARTS.values()))}
    if len(examples) > 1:
        published, live = (" with ".join(f"'{start}*'" for start in starts)
                           for starts in (LIVE_STARTS.values(), LIVE_STARTS))
        raise UserError(
            f"The weights mix two naming schemes, for example {examples[False]!r} and {examples[True]!r}; expected "
            f"either {published} or {live}. Export them again."
        )
    return True in examples


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
        """Find and check config and shards; only headers are read.

        With ``weights_required=False`` a directory without weights is accepted too (``tensors`` is empty).  Raises
        UserError if it is of another model, or its weights are incomplete, damaged or in another format.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory; expected a Hugging Face model directory.")
        files = sorted(os.listdir(directory))
        has_weights = any(is_model_weights(name) for name in files)
        if not has_weights and (found := [name for name in files if is_adapter_file(name)]):
            raise UserError(
                f"{directory} holds a LoRA adapter ({', '.join(found)}), not a model; give the directory of its base "
                f"model (adapter_config.json: base_model_name_or_path)."
            )
        config, config_bytes = _read_config(directory)
        if not (has_weights or weights_required or any(name.endswith(".bin") for name in files)):
            return cls(directory, config, {}, None, config_bytes)
        return cls(directory, config, *_read_tensors(directory), config_bytes)

    @property
    def files(self) -> tuple[Path, ...]:
        """config.json and all weight files."""
        return self.path / "config.json", *(self.path / file for file in self.contents)

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
        return model_from_hf(self.config, file=self.path / "config.json")

    def check(self, model: ModelConfig) -> None:
        """Check that config.json describes ``model``, and that the weights, if any, are exactly the model's.

        Raises UserError with each setting that differs, else with each tensor that does not fit.
        """
        self.check_config(model)
        refuse(misfit.text for misfit in self.views(model)[1] if self.tensors)

    def check_config(self, model: ModelConfig) -> None:
        """Raise UserError naming each setting in which config.json describes another model than ``model``."""
        refuse(hf_problems(model, self.path, "The model JSON", self.config_bytes))

    def views(self, model: ModelConfig) -> tuple[list[View], list[Misfit]]:
        """Views of all weights of ``model``, and tensors that do not fit.

        A tied model may have an output layer, which is then a copy of the embedding.
        """
        names = model.family.weights
        views, misfits, left_over = whole_views(
            model_weights(model), self.tensors,
            lambda name, shape: f"{self.path} lacks the tensor {name} of shape {list(shape)}{output_layer_hint(name)}.",
            lambda _, shape, stored: (
                f"{self.path / stored.file}: {stored.name} has shape {list(stored.shape)}; the model needs "
                f"{list(shape)}. Give weights that match the model JSON."))
        for name in left_over:
            stored, embedding = self.tensors[name], self.tensors.get(names.embedding_weight)
            is_copy = model.language.tied and name == names.output_layer_weight
            if is_copy and embedding and (stored.shape, stored.dtype) == (embedding.shape, embedding.dtype):
                weight = next(view.weight for view in views if view.weight.hf_names == (names.embedding_weight,))
                views.append(whole_view(stored, names.embedding_weight, weight))
            else:
                text = (f"{self.path / stored.file} holds {stored.name}, which is not a weight of the model"
                        f"{output_layer_hint(name)}.")
                misfits.append(Misfit("left over", text, hf_name=name, stored=stored))
        return views, misfits


def output_layer_hint(name: str) -> str:
    """A hint on why an output layer may be missing or left over; empty for other names."""
    for names in (family.weights for family in FAMILIES):
        if published_name(name) == names.output_layer_weight:
            return (
                f" (the model JSON's text_decoder.untie_embeddings_and_output_weights must be true exactly when the "
                f"model has an output layer that differs from {names.embedding_weight})"
            )
    return ""


def language_views(path: str | Path, config: Mapping[str, Any], model: ModelConfig) -> tuple[list[View], list[Path]]:
    """Views and files of the LLM in ``path``, which may be a text-only model or a whole one; paths are absolute.

    ``config`` is the config.json of the whole ``model``.  Raises UserError with each setting that differs, or each
    tensor that is missing or has another shape.
    """
    directory = Path(path).resolve()
    if not (directory / "config.json").is_file():
        raise UserError(f"--cfg.llm_hf_config.hf_dir {path} has no config.json; expected a Hugging Face directory.")
    config_bytes = (directory / "config.json").read_bytes()
    found = _parsed(directory / "config.json", config_bytes)
    expected, actual = (one.get("text_config") or one if isinstance(one, dict) else one for one in (config, found))
    if not isinstance(actual, dict):
        raise UserError(f"{directory / 'config.json'} holds {str(actual)[:80]!r}; expected an object with the sizes of "
                        f"an LLM.")
    refuse(f"{directory / 'config.json'}: {key} is {actual.get(key)}, but the whole model has {expected.get(key)}; "
           f"give an LLM of the same size." for key in language_keys(model.family)
           if actual.get(key) != expected.get(key))
    tensors, index = _read_tensors(directory)
    located = {name: replace(stored, file=str(directory / stored.file)) for name, stored in tensors.items()}
    language = HFDirectory(directory, found, located, index, config_bytes)
    views, misfits = language.views(model)
    refuse(misfit.text for misfit in misfits if misfit.weight is not None and misfit.weight.part == "language")
    return [view for view in views if view.weight.part == "language"], [directory / file for file in language.contents]


# Finding files


def _read_config(directory: Path) -> tuple[dict[str, Any], bytes]:
    """``config.json`` of a directory, parsed and as bytes.

    Raises UserError if it is absent, broken or of another model.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a Hugging Face model directory with its config.json.")
    config_bytes = path.read_bytes()
    config = _parsed(path, config_bytes)
    stated_family(config, path)
    if "quantization_config" in config:
        raise UserError(
            f"{path} has a quantization_config: quantized weights can be neither trained nor converted; give the "
            f"directory of the unquantized model."
        )
    return config, config_bytes


def is_model_weights(name: str) -> bool:
    """Whether a file of this name holds or lists weights of a model (not of an adapter)."""
    is_safetensors = name.endswith((".safetensors", ".safetensors.index.json"))
    return is_safetensors and not is_adapter_file(name)


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
    refuse_special(directory / INDEX_FILE)
    index = _parsed(directory / INDEX_FILE, (directory / INDEX_FILE).read_bytes())
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    files_named = weight_map.values() if isinstance(weight_map, dict) else ()
    if not files_named or not all(isinstance(name, str) for name in files_named):
        raise UserError(
            f"{directory / INDEX_FILE} has no 'weight_map' of tensor names to shard files; download it again."
        )
    shards = list(dict.fromkeys(files_named))
    outside = [name for name in shards if Path(name).name != name]
    if outside:
        raise UserError(f"{directory / INDEX_FILE} names {outside[0]!r}; expected plain file names beside it.")
    missing = [name for name in shards if name not in files]
    if missing:
        raise UserError(
            f"{directory} lacks {len(missing)} of the {len(shards)} shards that {INDEX_FILE} lists: "
            f"{', '.join(missing)}. The download was probably interrupted; finish it."
        )
    return index, shards


def _no_weights(directory: Path, files: list[str]) -> str:
    pickled = [name for name in files if name.endswith(".bin")]
    shards = [name for name in files if is_model_weights(name)]
    if shards:
        return (
            f"{directory} holds {', '.join(shards)} but no {INDEX_FILE}; the download was probably interrupted. "
            f"Finish it, or rename a single complete file to {SINGLE_FILE}."
        )
    if pickled:
        return (
            f"{directory} has weights only as a pickle, {pickled[0]}, which is not read because it can run code; "
            f"convert it with transformers: from_pretrained, then save_pretrained, which writes {SINGLE_FILE}."
        )
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
            if absent := _some(listed - found.keys()):
                problems.append(f"{directory / INDEX_FILE} lists {absent} in {shard}, which does not hold it; "
                                f"download both again.")
            if extra := _some(found.keys() - listed):
                problems.append(f"{directory / shard} holds {extra}, which {INDEX_FILE} does not list; download both "
                                f"again.")
        for tensor in found.values():
            twin = tensors.setdefault(published_name(tensor.name), tensor)
            if twin is not tensor:
                problems.append(f"{directory / tensor.file} holds {tensor.name} and {directory / twin.file} holds "
                                f"{twin.name}: the same weight twice. Remove one of them.")
    refuse(problems)
    return tensors, index


def _some(names: set[str], shown: int = 5) -> str:
    return ", ".join(sorted(names)[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _parsed(path: Path, raw: bytes) -> Any:
    """The JSON in ``raw``, the bytes of the file at ``path``."""
    refuse_lfs_pointer(path, raw)
    try:
        return json_value(raw)
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); download it again.") from error
