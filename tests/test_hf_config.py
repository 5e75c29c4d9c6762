"""config.json in its flat and nested form, as transformers reads both."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mm.errors import UserError
from mm.hf import HFDirectory, write_hf
from mm.hf_config import model_from_hf
from tests.saved_hf import save


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def saved(request, tmp_path_factory):
    return save(tmp_path_factory.mktemp("saved"), tied=request.param)


def flat(config: dict) -> dict:
    """The config as transformers 4 published it."""
    text = dict(config["text_config"])
    rope = text.pop("rope_parameters")
    vision = dict(config["vision_config"])
    vision["in_chans"] = vision.pop("in_channels")
    top = {key: value for key, value in config.items() if key not in ("text_config", "dtype")}
    return {**text, **top, "vision_config": vision, "torch_dtype": "bfloat16", "rope_theta": rope["rope_theta"],
            "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}


def test_flat_and_nested_configs_describe_the_same_model(saved, tmp_path):
    nested = HFDirectory.open(saved)
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    (copy / "config.json").write_text(json.dumps(flat(nested.config)))
    hf = HFDirectory.open(copy)
    assert hf.model_config() == nested.model_config()
    hf.check(nested.model_config())
    write_hf(tmp_path / "out", copy, hf.model_config(), hf.load_weight, dtype=torch.float16)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**hf.config, "torch_dtype": "float16"}


def test_transformers_reads_the_same_sizes_from_the_flat_form(saved, tmp_path):
    from transformers import Qwen2_5_VLConfig

    published = flat(HFDirectory.open(saved).config)
    (tmp_path / "config.json").write_text(json.dumps(published))
    theirs = Qwen2_5_VLConfig.from_pretrained(tmp_path)
    text, vision, ours = theirs.text_config, theirs.vision_config, model_from_hf(published)
    assert ours.language.tied == theirs.tie_word_embeddings
    assert ours.language.layernorm_epsilon == text.rms_norm_eps
    assert ours.language.rope_theta == text.rope_parameters["rope_theta"]
    assert list(ours.language.mrope_section) == text.rope_parameters["mrope_section"]
    assert ours.language.num_query_groups == text.num_key_value_heads
    assert ours.vision.window_attn_size == vision.window_size
    assert ours.vision.in_channels == vision.in_channels


def test_absent_keys_take_the_defaults_of_transformers():
    from transformers import Qwen2_5_VLConfig

    theirs = Qwen2_5_VLConfig()
    whole = theirs.to_dict()
    kept = {"depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size"}
    whole["vision_config"] = {key: value for key, value in whole["vision_config"].items() if key in kept}
    whole["text_config"]["rope_parameters"] = {"mrope_section": [16, 24, 24]}
    del whole["text_config"]["rms_norm_eps"], whole["tie_word_embeddings"]
    whole["text_config"].pop("tie_word_embeddings", None)
    ours, vision = model_from_hf(whole), theirs.vision_config
    assert ours.vision.window_attn_size == vision.window_size
    assert ours.vision.fullatt_block_indexes == tuple(vision.fullatt_block_indexes)
    assert (ours.vision.in_channels, ours.vision.patch_size) == (vision.in_channels, vision.patch_size)
    assert ours.vision.temporal_patch_size == vision.temporal_patch_size
    assert ours.vision.spatial_merge_size == vision.spatial_merge_size
    assert ours.vision.tokens_per_second == vision.tokens_per_second
    assert ours.language.layernorm_epsilon == theirs.text_config.rms_norm_eps
    assert ours.language.tied == theirs.tie_word_embeddings


@pytest.mark.parametrize("key", ["hidden_size", "num_key_value_heads", "vocab_size"])
def test_a_missing_size_is_named(saved, key):
    config = json.loads((saved / "config.json").read_text())
    del config["text_config"][key]
    with pytest.raises(UserError, match=f"config.json lacks '{key}'"):
        model_from_hf(config)
