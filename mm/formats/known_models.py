"""The published sizes of Qwen2.5-VL: which of them a directory without a manifest holds, by its shapes.

Heads cannot be read off the shapes of fused weights, so only these models are known, and only when every tensor fits.
"""

from contextlib import suppress
from typing import Any

from mm.config.model import ModelConfig
from mm.errors import UserError
from mm.formats.hf_config import MODEL_TYPE, model_from_hf
from mm.formats.mindspeed import MindSpeedDirectory

_SIZES = {
    # hidden size, LLM layers, ffn, heads, key/value heads, vocabulary, tied, ffn of the ViT
    "3B": (2048, 36, 11008, 16, 2, 151936, True, 3420),
    "7B": (3584, 28, 18944, 28, 4, 152064, False, 3420),
    "32B": (5120, 64, 27648, 40, 8, 152064, False, 3456),
    "72B": (8192, 80, 29568, 64, 8, 152064, False, 3456),
}
"""From the config.json files of huggingface.co/Qwen/Qwen2.5-VL-*-Instruct."""


def published_config(size: str) -> dict[str, Any]:
    """config.json of this size, as far as it concerns the weights."""
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


def published_model(size: str) -> ModelConfig:
    """The model of this size, on one stage."""
    return model_from_hf(published_config(size))


def recognize(directory: MindSpeedDirectory) -> ModelConfig | None:
    """The published model whose every tensor is in ``directory``; None when there is none."""
    for size in _SIZES:
        model = published_model(size)
        with suppress(UserError):
            if not directory.views(*directory.placed_model(None, "", model))[1]:
                return model
    return None
