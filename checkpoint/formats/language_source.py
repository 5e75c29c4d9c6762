"""The LLM of one Hugging Face directory in the place of another's: ``llm_hf_config``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint.formats.hf_files import HFTensor, find_shards, read_tensors
from mm.config.model import ModelConfig
from mm.errors import UserError
from mm.weights.table import model_weights
from mm.weights.views import Stored, View, whole_view

_COMPARED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "rms_norm_eps",
)  # fmt: skip


def language_views(path: str | Path, vl_config: Mapping[str, Any], model: ModelConfig) -> tuple[list[View], list[Path]]:
    """Views and files of the LLM in ``path``, a text-only Qwen2.5 or a Qwen2.5-VL; paths are absolute.

    ``vl_config`` is the config.json of the whole ``model``.

    Raises:
        UserError: naming each setting in which the two differ, and each tensor that is missing or has another shape.
    """
    directory = Path(path).resolve()
    if not (directory / "config.json").is_file():
        raise UserError(f"--cfg.llm_hf_config.hf_dir {path} has no config.json; expected a Hugging Face directory.")
    _check_config(directory, vl_config)
    index, shards = find_shards(directory, sorted(file.name for file in directory.iterdir()))
    tensors = read_tensors(directory, index, shards)
    views, problems = [], []
    for weight in model_weights(model):
        if weight.part != "language":
            continue
        for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
            tensor = tensors.get(name)
            if tensor is None:
                problems.append(f"{directory} lacks the tensor {name} of shape {list(shape)}.")
            elif tensor.shape != shape:
                problems.append(f"{tensor.file}: {name} has shape {list(tensor.shape)}; expected {list(shape)}.")
            else:
                views.append(whole_view(_stored(tensor), name, weight))
    if problems:
        raise UserError(problems)
    return views, sorted({tensor.file for tensor in tensors.values()})


def _check_config(directory: Path, vl_config: Mapping[str, Any]) -> None:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{directory / 'config.json'} is not valid JSON ({error}); download it again.") from error
    ours, theirs = (found.get("text_config") or found for found in (vl_config, config))
    problems = [
        f"{directory / 'config.json'}: {key} is {theirs.get(key)}, but the whole model has {ours.get(key)}; give the "
        f"LLM of the same size."
        for key in _COMPARED
        if theirs.get(key) != ours.get(key)
    ]
    if problems:
        raise UserError(problems)


def _stored(tensor: HFTensor) -> Stored:
    return Stored(str(tensor.file), tensor.name, tensor.dtype, tensor.shape, tensor.offset)


def only(views: list[View], model: ModelConfig, *parts: str) -> list[View]:
    """The views of the weights of these parts of the model ("vision", "projector", "language")."""
    names = {name for weight in model_weights(model) if weight.part in parts for name in weight.hf_names}
    return [view for view in views if all(run.key is None or run.key in names for run in view.runs)]
