"""Compares a model JSON with the ``config.json`` of a Hugging Face directory, in its old flat and new nested form.

Only the sizes and settings that make two models different ones; knows nothing of weights or flags.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint.formats.hf_config import is_tied
from mm.config.model import ModelConfig
from mm.config.read import read_json
from mm.errors import UserError

MODEL_TYPE = "qwen2_5_vl"
_TOLERANCE = 1e-6
"""Relative, for epsilons and rope bases."""


def hf_problems(model: ModelConfig, directory: str | Path, model_path: str) -> list[str]:
    """Say how ``model``, read from ``model_path``, differs from the model in ``directory``.

    One problem with a table of all differing fields; empty when they agree or ``directory`` has no ``config.json``.
    A field that the Hugging Face file leaves out is not compared.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        return []
    try:
        found = read_json(path).root
    except UserError as error:
        return list(error.problems)
    model_type = found.get("model_type") if isinstance(found, dict) else None
    if model_type != MODEL_TYPE:
        return [f"{path}: model_type is {model_type!r}; expected {MODEL_TYPE!r}"]
    broken = _broken_sections(found)
    if broken:
        return [f"{path}: {key} is {value!r}; expected an object {{...}}" for key, value in broken]
    rows = [(key, ours, theirs) for key, ours, theirs in _pairs(model, found) if theirs is not None]
    differing = [row for row in rows if not _equal(row[1], row[2])]
    if not differing:
        return []
    width = max(len(key) for key, _, _ in differing)
    table = "\n".join(f"    {key:<{width}}  {_plain(ours)}  |  {theirs}" for key, ours, theirs in differing)
    return [f"{model_path} describes another model than {path}; use the model JSON of the same size. Differing fields "
            f"(model JSON | config.json):\n{table}"]


def _broken_sections(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Where a value stands in the place of the sections that are read below."""
    text = found.get("text_config")
    inner = text if isinstance(text, dict) and text else found
    sections = [("text_config", text), ("vision_config", found.get("vision_config"))]
    sections += [(key, inner.get(key)) for key in ("rope_parameters", "rope_scaling")]
    return [(key, value) for key, value in sections if not isinstance(value, dict | None)]


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=_TOLERANCE)
    return _plain(ours) == theirs


def _plain(value: Any) -> Any:
    """As JSON has it."""
    return list(value) if isinstance(value, tuple) else value


def _pairs(model: ModelConfig, found: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(our key, our value, their value or None) for everything that is compared."""
    text = found.get("text_config") or found
    vit = found.get("vision_config") or {}
    rope = text.get("rope_parameters") or {}
    scaling = text.get("rope_scaling") or {}
    tied = is_tied(found)
    language, vision, projector = model.language, model.vision, model.projector
    encoder, decoder = "image_encoder.vision_encoder", "text_decoder"
    return [
        (f"{decoder}.num_layers", language.num_layers, text.get("num_hidden_layers")),
        (f"{decoder}.hidden_size", language.hidden_size, text.get("hidden_size")),
        (f"{decoder}.ffn_hidden_size", language.ffn_hidden_size, text.get("intermediate_size")),
        (f"{decoder}.num_attention_heads", language.num_attention_heads, text.get("num_attention_heads")),
        (f"{decoder}.num_query_groups", language.num_query_groups, text.get("num_key_value_heads")),
        (f"{decoder}.vocab_size", language.vocab_size, text.get("vocab_size", found.get("vocab_size"))),
        (f"{decoder}.untie_embeddings_and_output_weights", language.untie_embeddings_and_output_weights,
         None if tied is None else not tied),
        (f"{decoder}.layernorm_epsilon", language.layernorm_epsilon, text.get("rms_norm_eps")),
        (f"{decoder}.rope_theta", language.rope_theta, rope.get("rope_theta", text.get("rope_theta"))),
        (f"{decoder}.mrope_section", language.mrope_section, rope.get("mrope_section", scaling.get("mrope_section"))),
        (f"{encoder}.num_layers", vision.num_layers, vit.get("depth")),
        (f"{encoder}.hidden_size", vision.hidden_size, vit.get("hidden_size")),
        (f"{encoder}.ffn_hidden_size", vision.ffn_hidden_size, vit.get("intermediate_size")),
        (f"{encoder}.num_attention_heads", vision.num_attention_heads, vit.get("num_heads")),
        (f"{encoder}.in_channels", vision.in_channels, vit.get("in_channels", vit.get("in_chans"))),
        (f"{encoder}.patch_size", vision.patch_size, vit.get("patch_size")),
        (f"{encoder}.temporal_patch_size", vision.temporal_patch_size, vit.get("temporal_patch_size")),
        (f"{encoder}.spatial_merge_size", vision.spatial_merge_size, vit.get("spatial_merge_size")),
        (f"{encoder}.window_attn_size", vision.window_attn_size, vit.get("window_size")),
        (f"{encoder}.fullatt_block_indexes", vision.fullatt_block_indexes, vit.get("fullatt_block_indexes")),
        (f"{encoder}.tokens_per_second", vision.tokens_per_second, vit.get("tokens_per_second")),
        ("image_encoder.vision_projector.hidden_size", projector.hidden_size, vit.get("out_hidden_size")),
        ("img_context_token_id", model.image_token_id, found.get("image_token_id")),
        ("video_token_id", model.video_token_id, found.get("video_token_id")),
        ("vision_start_token_id", model.vision_start_token_id, found.get("vision_start_token_id")),
    ]
