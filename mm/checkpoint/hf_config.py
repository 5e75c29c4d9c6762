"""``config.json``, flat (transformers 4) or nested (5): the model that it describes, compared with others, and written
so that both versions read the same model."""

import dataclasses
import json
import math
from collections.abc import Iterator
from functools import reduce
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from mm.config.mindspeed import OTHER_MODELS
from mm.config.model import ModelConfig
from mm.config.parse import expected, parse_json, read_json, settings_of, shown
from mm.errors import UserError, refuse
from mm.families import FAMILIES, TITLES, family_of
from mm.families.family import ROPE_KEYS, Family, Section

FREE_ON_RESUME = ("pipeline_num_layers", "encoder_placement", "encoder_batch_microbatches", "freeze", "freeze_layers",
                  "freeze_modules", "trainable_modules", "lora", "rates", "recompute", "offload",
                  "init_method_std")  # fmt: skip
"""Fields of a model that may differ between save and load: they do not change what a stored tensor means.  Adapters,
which are other tensors, are compared in ``mm.checkpoint.adapters``."""
FREE_FIELDS = (*FREE_ON_RESUME, "max_position_embeddings")
"""The same for a model from a config.json, whose max_position_embeddings has no effect here."""


def language_keys(family: Family) -> tuple[str, ...]:
    """Keys of config.json that must be equal for the LLM of another directory to replace a model's own."""
    return tuple(name for field, key in family.config_json.keys.items()
                 if key.section == "text" and field.rpartition(".")[2] not in FREE_FIELDS for name in key.names)


def stated_family(config: object, file: object) -> Family:
    """The family of a parsed ``config.json``.  Raises UserError for another model; ``file`` is its path."""
    family = family_of(config) if isinstance(config, dict) else None
    if family is None:
        model_type = config.get("model_type") if isinstance(config, dict) else None
        expected_types = " or ".join(repr(family.config_json.model_type) for family in FAMILIES)
        raise UserError(f"{file} has model_type {model_type!r}; expected {expected_types}: {OTHER_MODELS}. Give the "
                        f"directory of a {TITLES} model.")
    return family


def model_from_hf(
    config: Section, otherwise: ModelConfig | None = None, file: object = "config.json"
) -> ModelConfig:
    """The model of a parsed ``config.json``, all on one stage; ``file`` is its path, for messages.

    Absent keys take the value of ``otherwise``, or without it transformers' defaults.
    """
    family = otherwise.family if otherwise is not None else stated_family(config, file)
    sections, found = _sections(config, family, file), {"vision": {}, "projector": {}, "language": {}}
    if otherwise is not None:
        found = dataclasses.asdict(otherwise)
    elif not sections["vision"]:
        raise UserError(f"{file} lacks 'vision_config'; expected a complete config of {family.title}.")
    for field, key in family.config_json.keys.items():
        tower, _, name = field.rpartition(".")
        values = found[tower] if tower else found
        stated = (sections[key.section].get(one) for one in key.names)
        value = next((one for one in stated if one is not None), values.get(name, key.default))
        if value is None:
            raise UserError(f"{file} lacks {key.names[0]!r}; expected a complete config of {family.title}.")
        values[name] = value
    vision, language, tied = found["vision"], found["language"], is_tied(config)
    vision.setdefault("pipeline_num_layers", [[vision["num_layers"]]])
    language.setdefault("pipeline_num_layers", [[language["num_layers"]]])
    if tied is not None or otherwise is None:
        language["untie_embeddings_and_output_weights"] = not tied
    language.pop("kv_channels", None)  # follows from heads and hidden size
    sizes = vision["hidden_size"], vision["spatial_merge_size"]
    merged_size = sizes[0] * sizes[1] ** 2 if all(isinstance(size, int) for size in sizes) else None
    found["projector"] |= {"input_size": vision["hidden_size"], "ffn_hidden_size": merged_size}
    try:
        return TypeAdapter(ModelConfig).validate_json(json.dumps(found), strict=True)
    except ValidationError as error:
        unread = f"{file} describes no model ({error.errors()[0]['msg']}); download it again."
        raise UserError(list(_value_problems(error, found, family, file)) or unread) from error


def _value_problems(error: ValidationError, found: Section, family: Family, file: object) -> Iterator[str]:
    """Problems with values that ``file`` states, without those of fields derived from them."""
    wrong = {".".join(key for key in one["loc"] if isinstance(key, str)) for one in error.errors()}
    keys = family.config_json.keys
    for name, _, field in settings_of(ModelConfig):
        if name in wrong and name in keys:
            value = reduce(getitem, name.split("."), found)
            yield f"{file}: {keys[name].names[0]} is {shown(value)}; expected {expected(field)}."


def _sections(config: Section, family: Family, file: object) -> dict[str, Section]:
    """The sections that ``ConfigKey.section`` names.  Raises UserError for values that the family does not allow."""
    text, vision = config.get("text_config") or config, config.get("vision_config")
    ropes = {key: text.get(key) for key in ROPE_KEYS} if isinstance(text, dict) else {}
    refuse(f"{file}: {key} is {value!r}; expected an object {{...}}"
           for key, value in {"text_config": text, "vision_config": vision, **ropes}.items()
           if not isinstance(value, dict | None))
    refuse(family.config_json.fixed_problems(config, file))
    rope = next(filter(None, ropes.values()), {})
    return {"top": config, "text": text, "vision": vision or {}, "rope": {"rope_theta": text.get("rope_theta"), **rope}}


# Comparing models


class FieldDifference(NamedTuple):
    """A field in which two models differ, its key in a model JSON, and both values, with tuples as lists."""

    field: str
    json_name: str
    first: Any
    second: Any


def differences(one: ModelConfig, other: ModelConfig, but: tuple[str, ...] = FREE_FIELDS) -> list[FieldDifference]:
    """Every field in which two models differ, except those named in ``but``."""
    found = []
    for name, key_paths, _ in settings_of(ModelConfig):
        values = [attrgetter(name)(model) for model in (one, other)]
        if set(but).isdisjoint(name.split(".")) and not _equal(*values):
            found.append(FieldDifference(name, key_paths[0], *(list(v) if isinstance(v, tuple) else v for v in values)))
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)  # epsilons and rope bases
    return one == other


def hf_problems(
    model: ModelConfig, directory: str | Path, model_path: str, config_bytes: bytes | None = None
) -> list[str]:
    """How ``model``, read from ``model_path``, differs from the model in ``directory``: a table in one problem.

    Empty if they agree or there is no ``config.json``.  What that file leaves out is not compared.  ``config_bytes``:
    its content, if it has already been read.
    """
    path = Path(directory) / "config.json"
    if config_bytes is None and not path.is_file():
        return []
    try:
        config = (read_json(path) if config_bytes is None else parse_json(path, config_bytes)).root
        model_type = config.get("model_type") if isinstance(config, dict) else None
        if model_type != (expected_type := model.family.config_json.model_type):
            return [f"{path}: model_type is {model_type!r}; expected {expected_type!r}: {OTHER_MODELS}"]
        found = differences(model, model_from_hf(config, model, path))
    except UserError as error:
        return list(error.problems)
    if not found:
        return []
    width = max(len(one.json_name) for one in found)
    table = "\n".join(f"    {one.json_name:<{width}}  {one.first}  |  {one.second}" for one in found)
    return [f"{model_path} describes another model than {path}; use the model JSON of the same size. Differing fields "
            f"(model JSON | config.json):\n{table}"]


def stored_problems(
    where: Path, stored: ModelConfig, model: ModelConfig, but: tuple[str, ...] = FREE_FIELDS
) -> list[str]:
    """A problem for each field in which ``model`` differs from ``stored``, the model of the checkpoint at ``where``."""
    return [f"{where}: the checkpoint was saved with {one.json_name} = {one.first!r}, but the model JSON says "
            f"{one.second!r}; give the model JSON that it was trained with."
            for one in sorted(differences(stored, model, but), key=attrgetter("json_name"))]


# Other facts in config.json


def is_tied(config: Section) -> bool | None:
    """Whether the output layer is the word embedding, by the top level or the text config; None if neither says.

    transformers 5.23 accepts either place too; 4.57 reads the text config only, 5.8 the top level only.
    """
    stated = [section.get("tie_word_embeddings") for section in (config, config.get("text_config") or {})]
    return None if stated == [None, None] else any(stated)


def for_both_versions(config: Section) -> dict[str, Any]:
    """The config with the keys that transformers 4.57 or 5 would miss; equal to ``config`` if both can read it.

    Both read the published flat form.  Version 5 saves the rotary embedding as ``rope_parameters``, which 4.57 does not
    know: it uses its default ``rope_theta`` and fails without ``rope_scaling``.  Each version saves
    ``tie_word_embeddings`` only where it reads it itself; the other then initializes a random output layer for a tied
    model (see ``is_tied``).  Both read ``dtype`` as well as ``torch_dtype``.
    """
    nested = config.get("text_config")
    text = _with_rope_scaling(nested or config)
    if not nested:
        return text
    tied = {"tie_word_embeddings": True} if is_tied(config) else {}
    return {**config, **tied, "text_config": {**text, **tied}}


def _with_rope_scaling(text: Section) -> dict[str, Any]:
    rope = text.get("rope_parameters")
    if not rope:
        return dict(text)
    scaling = {"rope_type": rope.get("type", "default")} | {k: v for k, v in rope.items() if k != "rope_theta"}
    added = {"rope_scaling": scaling, "rope_theta": rope.get("rope_theta")}
    return {**text, **{key: value for key, value in added.items() if text.get(key) is None and value is not None}}


def stated_dtype(config: Section) -> str | None:
    """The dtype of the weights that the config states, such as "bfloat16": ``dtype``, or ``torch_dtype`` before v5."""
    return config.get("dtype") or config.get("torch_dtype")


def with_dtype(config: Section, name: str) -> dict[str, Any]:
    """The config with every statement of the weights' dtype replaced; one is added when there is none."""
    keys = {"dtype", "torch_dtype"}
    patched = json.loads(json.dumps(config), object_hook=lambda one: one | dict.fromkeys(keys & one.keys(), name))
    return patched if stated_dtype(patched) else {**patched, "torch_dtype": name}
