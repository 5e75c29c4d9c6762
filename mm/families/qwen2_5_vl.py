"""The record of Qwen2.5-VL: its control tokens, its ``config.json`` and published sizes, and its weights' names.

Every key of ``config.json`` that transformers reads is in ``KEYS``, does not affect training, or must have the value
that is implemented here (``FIXED``); a test goes through all of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mm.families.family import (
    ROPE_KEYS,
    ChatTokens,
    ConfigJson,
    ConfigKey,
    Family,
    LayerNames,
    MindSpeedNames,
    Section,
    WeightNames,
)

TOKENS = ChatTokens(
    image="<|image_pad|>", video="<|video_pad|>", vision_start="<|vision_start|>", vision_end="<|vision_end|>",
    turn_start="<|im_start|>", turn_end="<|im_end|>", box_start="<|box_start|>", box_end="<|box_end|>",
    others=("<|endoftext|>", "<|vision_pad|>"), image_id=151655, video_id=151656, vision_start_id=151652,
)

FIXED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "text": {
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
        "attention_dropout": (0,),
        "chunk_size_feed_forward": (0,),
        "is_encoder_decoder": (False,),
    },
    "vision": {"hidden_act": ("silu",), "chunk_size_feed_forward": (0,), "is_encoder_decoder": (False,)},
}
"""Section -> key -> the values that it may have, if it is present and not null."""
_ROPE_FIXED = {"text": {"partial_rotary_factor": (1,), "mrope_interleaved": (False,)},
               "vision": {"partial_rotary_factor": (1,), "rope_theta": (10000,)}}  # fmt: skip
"""The same for keys inside the rotary embedding.  The ViT's is Qwen2-VL's: base 10000 over rows and columns."""
_ROPE_TYPES = {"text": ("default", "mrope"), "vision": ("default", "axial")}


def fixed_problems(config: Section, file: object = "config.json") -> Iterator[str]:
    """Settings in a parsed ``config.json``, read from ``file``, that ask for a model not computed here."""
    text, vision = (config.get(f"{tower}_config") for tower in FIXED)
    for tower, sections in (("text", (config, text)), ("vision", (vision,))):
        for section in (one for one in sections if isinstance(one, dict)):
            where = "" if section is config else f"{tower}_config."
            yield from _wrong(section, FIXED[tower], f"{file}: {where}")
            layers = section.get("layer_types")
            if isinstance(layers, list) and (kinds := {str(one) for one in layers}) != {"full_attention"}:
                yield f"{file}: {where}layer_types has {sorted(kinds)}; expected 'full_attention' only."
            for key in ROPE_KEYS:
                rope = section.get(key)
                if isinstance(rope, dict):
                    yield from _wrong(rope, _ROPE_FIXED[tower], f"{file}: {where}{key}.")
                    found = {str(rope[one]) for one in ("type", "rope_type") if rope.get(one) is not None}
                    if not found <= {*_ROPE_TYPES[tower]}:
                        yield (f"{file} asks for the rotary embedding {sorted(found)} ({where}{key}); expected "
                               f"{' or '.join(map(repr, _ROPE_TYPES[tower]))}: scaled ones (yarn, linear, ...) are not "
                               f"computed here. Give the config.json of the published model.")


def _wrong(section: Section, fixed: Mapping[str, tuple[Any, ...]], where: str) -> Iterator[str]:
    for key, values in fixed.items():
        if section.get(key) not in (None, *values):
            yield (f"{where}{key} is {section[key]!r}; expected {values[0]!r}, the only way in which the "
                   f"model is computed here.")


MODEL_TYPE = "qwen2_5_vl"

KEYS: Mapping[str, ConfigKey] = {
    "language.num_layers": ConfigKey("text", ("num_hidden_layers",)),
    "language.hidden_size": ConfigKey("text", ("hidden_size",)),
    "language.ffn_hidden_size": ConfigKey("text", ("intermediate_size",)),
    "language.num_attention_heads": ConfigKey("text", ("num_attention_heads",)),
    "language.num_query_groups": ConfigKey("text", ("num_key_value_heads",)),
    "language.vocab_size": ConfigKey("text", ("vocab_size",)),
    "language.max_position_embeddings": ConfigKey("text", ("max_position_embeddings",)),
    "language.layernorm_epsilon": ConfigKey("text", ("rms_norm_eps",), 1e-5),
    "language.rope_theta": ConfigKey("rope", ("rope_theta",), 1_000_000.0),
    "language.mrope_section": ConfigKey("rope", ("mrope_section",)),
    "vision.num_layers": ConfigKey("vision", ("depth",)),
    "vision.hidden_size": ConfigKey("vision", ("hidden_size",)),
    "vision.ffn_hidden_size": ConfigKey("vision", ("intermediate_size",)),
    "vision.num_attention_heads": ConfigKey("vision", ("num_heads",)),
    "vision.in_channels": ConfigKey("vision", ("in_channels", "in_chans"), 3),
    "vision.patch_size": ConfigKey("vision", ("patch_size",), 14),
    "vision.temporal_patch_size": ConfigKey("vision", ("temporal_patch_size",), 2),
    "vision.spatial_merge_size": ConfigKey("vision", ("spatial_merge_size",), 2),
    "vision.window_attn_size": ConfigKey("vision", ("window_size",), 112),
    "vision.fullatt_block_indexes": ConfigKey("vision", ("fullatt_block_indexes",), (7, 15, 23, 31)),
    "vision.tokens_per_second": ConfigKey("vision", ("tokens_per_second",), 4),
    "projector.hidden_size": ConfigKey("vision", ("out_hidden_size",)),
    "image_token_id": ConfigKey("top", ("image_token_id",), TOKENS.image_id),
    "video_token_id": ConfigKey("top", ("video_token_id",), TOKENS.video_id),
    "vision_start_token_id": ConfigKey("top", ("vision_start_token_id",), TOKENS.vision_start_id),
}
"""See ``ConfigJson.keys``; the defaults are those of ``Qwen2_5_VLTextConfig`` and ``Qwen2_5_VLVisionConfig``."""

_SIZES = {
    # hidden size, LLM layers, ffn, heads, key/value heads, vocabulary, tied, ffn of the ViT
    "3B": (2048, 36, 11008, 16, 2, 151936, True, 3420),
    "7B": (3584, 28, 18944, 28, 4, 152064, False, 3420),
    "32B": (5120, 64, 27648, 40, 8, 152064, False, 3456),
    "72B": (8192, 80, 29568, 64, 8, 152064, False, 3456),
}
"""From the config.json files of huggingface.co/Qwen/Qwen2.5-VL-*-Instruct."""


def published_config(size: str) -> dict[str, Any]:
    """The part of this size's ``config.json`` that determines the weights."""
    hidden, num_layers, ffn, heads, groups, vocab, tied, vision_ffn = _SIZES[size]
    return {
        "model_type": MODEL_TYPE, "torch_dtype": "bfloat16",
        "hidden_size": hidden, "num_hidden_layers": num_layers, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": vocab, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128000, "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": vision_ffn, "num_heads": 16,
            "out_hidden_size": hidden, "fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112,
            "tokens_per_second": 2,
        },
    }  # fmt: skip


_WEIGHTS = WeightNames(
    patch_embedding="visual.patch_embed.proj",
    vision_layer=LayerNames(
        layers="visual.blocks", first_norm="norm1", qkv=("attn.qkv",), projection="attn.proj", second_norm="norm2",
        gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj", has_bias=True,
    ),
    projector_norm="visual.merger.ln_q",
    projector_linears=("visual.merger.mlp.0", "visual.merger.mlp.2"),
    embedding="model.embed_tokens",
    language_layer=LayerNames(
        layers="model.layers", first_norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), projection="self_attn.o_proj",
        second_norm="post_attention_layernorm", gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj",
        has_bias=False,
    ),
    final_norm="model.norm",
    output_layer="lm_head",
    live_starts={"model.visual.": "visual.", "model.language_model.": "model."},  # since transformers 4.52
)

QWEN2_5_VL = Family(
    title="Qwen2.5-VL",
    mindspeed=MindSpeedNames(
        model_ids=("qwen2_5vl", "qwen2vl"), vision_ids=("qwen2vit", "qwen2_5_vit"), projector_ids=("lnmlp",),
        language_ids=("qwen2_5_lm",), pipelines=("Qwen2VlPipeline",), templates=("qwen2vl",), collators=("qwen2vl",),
        converter="Qwen2_5_VLConverter",
    ),
    tokens=TOKENS,
    weights=_WEIGHTS,
    config_json=ConfigJson(MODEL_TYPE, KEYS, fixed_problems, {size: published_config(size) for size in _SIZES}),
    vision_epsilon=1e-6,
)
