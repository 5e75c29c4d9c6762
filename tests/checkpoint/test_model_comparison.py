"""A model JSON against Hugging Face's config.json in both forms, the nested one written by transformers itself."""

import json

import pytest
from transformers import Qwen2_5_VLConfig

from mm.checkpoint.hf_config import hf_problems
from mm.config.model import read_model
from tests.files import EXAMPLES

FLAT_3B = {
    "model_type": "qwen2_5_vl", "hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 128000,
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "tie_word_embeddings": True, "vocab_size": 151936, "image_token_id": 151655,
    "video_token_id": 151656, "vision_start_token_id": 151652,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
        "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip


@pytest.fixture(params=["flat", "nested"])
def config(request, tmp_path) -> dict:
    """config.json of the 3B model in the old and the new form."""
    if request.param == "flat":
        return json.loads(json.dumps(FLAT_3B))
    Qwen2_5_VLConfig(**FLAT_3B).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "text_config" in written
    return written


def problems_of(tmp_path, config: object, size: str = "3b") -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return hf_problems(read_model(EXAMPLES / f"model_{size}.json").value, tmp_path, f"model_{size}.json")


def test_the_same_model_is_accepted(tmp_path, config):
    assert problems_of(tmp_path, config) == []


def test_another_size_gives_one_table(tmp_path, config):
    (problem,) = problems_of(tmp_path, config, "7b")
    for key in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size",
                "untie_embeddings_and_output_weights"):
        assert f"text_decoder.{key} " in problem
    assert "image_encoder.vision_projector.hidden_size" in problem
    assert "vision_encoder" not in problem
    assert "model_7b.json describes another model" in problem


@pytest.mark.parametrize(("key", "field", "value"), [
    ("tokens_per_second", "tokens_per_second", 4),
    ("window_size", "window_attn_size", 224),
    ("fullatt_block_indexes", "fullatt_block_indexes", [7, 15, 23]),
])
def test_settings_that_would_silently_train_another_model(tmp_path, config, key, field, value):
    config["vision_config"][key] = value
    (problem,) = problems_of(tmp_path, config)
    assert f"image_encoder.vision_encoder.{field} " in problem
    assert problem.count("\n") == 1
