"""The model that a Hugging Face ``config.json`` describes, flat (transformers 4) or nested (5), as our ModelConfig.

Also what a config must say for either version to read that model from it.  Knows nothing of files, weights or devices.
Whether a model JSON agrees with the file is asked elsewhere.
"""

from collections.abc import Mapping
from typing import Any

from mm.config.model import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from mm.errors import UserError
from mm.placement import PipelineLayout

Section = Mapping[str, Any]


def model_from_hf(
    config: Section, vision_layout: PipelineLayout | None = None, language_layout: PipelineLayout | None = None
) -> ModelConfig:
    """The model of a parsed ``config.json`` on the given ``[chunk][stage]`` lists (default: all on one stage).

    Absent keys take transformers' defaults (``Qwen2_5_VLTextConfig`` and ``Qwen2_5_VLVisionConfig``).  The lists are
    not checked against the layer counts: that is ``placement.layout_problems``.

    Raises:
        UserError: the config lacks a size.
    """
    try:
        text, vit = config.get("text_config") or config, config["vision_config"]
        return ModelConfig(
            vision=_vision(vit, vision_layout),
            projector=ProjectorConfig(
                input_size=vit["hidden_size"],
                ffn_hidden_size=vit["hidden_size"] * vit.get("spatial_merge_size", 2) ** 2,
                hidden_size=vit["out_hidden_size"],
            ),
            language=_language(text, language_layout, bool(is_tied(config))),
            image_token_id=config.get("image_token_id", 151655),
            video_token_id=config.get("video_token_id", 151656),
            vision_start_token_id=config.get("vision_start_token_id", 151652),
        )
    except KeyError as error:
        raise UserError(f"config.json lacks {error.args[0]!r}; expected a complete config of Qwen2.5-VL.") from error


def is_tied(config: Section) -> bool | None:
    """Whether the output layer is the word embedding, by either of the places that say so; None when neither does.

    transformers 5.23 takes either too.  4.57 asks the text config only, 5.8 the top level only.
    """
    said = [section.get("tie_word_embeddings") for section in (config, config.get("text_config") or {})]
    return None if said == [None, None] else any(said)


def for_both_versions(config: Section) -> dict[str, Any]:
    """The config with what transformers 4.57 or 5 would miss in it; equal to ``config`` when both read it as it is.

    The published flat form is such a one.  What 5 saves says rope in ``rope_parameters``, which 4.57 does not know: it
    takes its own ``rope_theta`` and fails for want of ``rope_scaling``.  Either version saves a tied model with the
    one ``tie_word_embeddings`` that it asks itself, where others then draw a random output layer (see ``is_tied``).
    Both read ``dtype`` as well as ``torch_dtype``.
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


def _vision(vit: Section, layout: PipelineLayout | None) -> VisionConfig:
    return VisionConfig(
        num_layers=vit["depth"],
        pipeline_num_layers=layout or ((vit["depth"],),),
        hidden_size=vit["hidden_size"],
        ffn_hidden_size=vit["intermediate_size"],
        num_attention_heads=vit["num_heads"],
        window_attn_size=vit.get("window_size", 112),
        fullatt_block_indexes=tuple(vit.get("fullatt_block_indexes", (7, 15, 23, 31))),
        in_channels=vit.get("in_channels", vit.get("in_chans", 3)),
        patch_size=vit.get("patch_size", 14),
        temporal_patch_size=vit.get("temporal_patch_size", 2),
        spatial_merge_size=vit.get("spatial_merge_size", 2),
        tokens_per_second=vit.get("tokens_per_second", 4),
    )


def _language(text: Section, layout: PipelineLayout | None, tied: bool) -> LanguageConfig:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope_types = {rope[key] for key in ("type", "rope_type") if rope.get(key) is not None}
    if not rope_types <= {"default", "mrope"}:
        raise UserError(
            f"config.json asks for the rotary embedding {sorted(rope_types)}; expected 'mrope' or 'default': "
            f"scaled ones (yarn, linear, ...) are not computed here. Give the config.json of the published model."
        )
    return LanguageConfig(
        num_layers=text["num_hidden_layers"],
        pipeline_num_layers=layout or ((text["num_hidden_layers"],),),
        hidden_size=text["hidden_size"],
        ffn_hidden_size=text["intermediate_size"],
        num_attention_heads=text["num_attention_heads"],
        num_query_groups=text["num_key_value_heads"],
        vocab_size=text["vocab_size"],
        max_position_embeddings=text["max_position_embeddings"],
        mrope_section=tuple(rope["mrope_section"]),
        kv_channels=text["hidden_size"] // text["num_attention_heads"],
        rope_theta=rope.get("rope_theta", text.get("rope_theta", 1_000_000.0)),
        untie_embeddings_and_output_weights=not tied,
        layernorm_epsilon=text.get("rms_norm_eps", 1e-5),
    )
