"""The ``config.json`` of Qwen2.5-VL: which keys hold our settings, and the published sizes."""

from collections.abc import Mapping
from typing import Any

from mm.families.family import ConfigKey
from mm.families.qwen2_5_vl.tokens import TOKENS

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


PUBLISHED = {size: published_config(size) for size in _SIZES}
