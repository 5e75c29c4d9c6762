"""config.json in its flat and nested form, as transformers reads both."""

import json
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLConfig

from mm.checkpoint import convert
from mm.checkpoint.hf import HFDirectory
from mm.checkpoint.hf_config import for_both_versions, hf_problems, is_tied, model_from_hf
from mm.checkpoint.mindspeed_layout import Layout
from mm.config.model import read_model
from mm.errors import UserError
from tests.files import EXAMPLES
from tests.saved_hf import cast


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
    cast(copy, tmp_path / "half", torch.float16)
    convert.hf_to_mm(tmp_path / "half", tmp_path / "mm", Layout(((4,),), ((4,),), 1)).run()
    convert.mm_to_hf(tmp_path / "mm", copy, tmp_path / "out").run()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**hf.config, "torch_dtype": "float16"}


def test_absent_keys_take_the_defaults_of_transformers():
    expected = Qwen2_5_VLConfig()
    whole = expected.to_dict()
    kept = {"depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size"}
    whole["vision_config"] = {key: value for key, value in whole["vision_config"].items() if key in kept}
    whole["text_config"]["rope_parameters"] = {"mrope_section": [16, 24, 24]}
    del whole["text_config"]["rms_norm_eps"], whole["tie_word_embeddings"]
    whole["text_config"].pop("tie_word_embeddings", None)
    parsed, vision = model_from_hf(whole), expected.vision_config
    assert parsed.vision.window_attn_size == vision.window_size
    assert parsed.vision.fullatt_block_indexes == tuple(vision.fullatt_block_indexes)
    assert (parsed.vision.in_channels, parsed.vision.patch_size) == (vision.in_channels, vision.patch_size)
    assert parsed.vision.temporal_patch_size == vision.temporal_patch_size
    assert parsed.vision.spatial_merge_size == vision.spatial_merge_size
    assert parsed.vision.tokens_per_second == vision.tokens_per_second
    assert parsed.language.layernorm_epsilon == expected.text_config.rms_norm_eps
    assert parsed.language.tied == expected.tie_word_embeddings


def nested_by_4(config: dict) -> dict:
    """As transformers 4.57.6 saves a flat config: everything twice, ``tie_word_embeddings`` once."""
    published = flat(config)
    del published["torch_dtype"]
    rope = {"mrope_section": published["rope_scaling"]["mrope_section"], "rope_type": "default", "type": "default"}
    text = {key: published[key] for key in config["text_config"] if key in published}
    text |= {"rope_theta": published["rope_theta"], "rope_scaling": rope, "dtype": "bfloat16"}
    top = published | {"rope_scaling": rope, "dtype": "bfloat16"}
    del (top if published["tie_word_embeddings"] else text)["tie_word_embeddings"]
    return {**top, "text_config": text}


def resaved_by_5(config: dict) -> dict:
    """As transformers 5 saves a flat config: without tied embeddings in the text config."""
    nested = json.loads(Qwen2_5_VLConfig(**flat(config)).to_json_string())
    assert "tie_word_embeddings" not in nested["text_config"]
    return nested


FORMS = {"flat": flat, "saved by 5": dict, "flat saved by 5": resaved_by_5, "flat saved by 4": nested_by_4}


@pytest.fixture(params=FORMS)
def form(request, saved) -> dict:
    """The config of the same model in one of the known forms."""
    return FORMS[request.param](HFDirectory.open(saved).config)


def test_a_config_for_both_versions_has_the_keys_that_each_reads(form, saved):
    """The keys were found with transformers 4.57.6, 5.0.0, 5.8.0 and 5.23.0 by hand.

    As the forms are, 4.57 fails at the first forward ('NoneType' object is not subscriptable: rope_scaling) and has
    rope_theta 1e6 for the 1e4 of "saved by 5" and "flat saved by 5"; it draws a random lm_head for the latter when
    tied, as 5.0 and 5.8 do for "flat saved by 4".  With the keys below, from_pretrained of all four versions misses
    nothing, and logits on two images and text (float32, one thread) and greedy tokens are bit-equal.
    """
    both = for_both_versions(form)
    original = model_from_hf(HFDirectory.open(saved).config)
    assert model_from_hf(both) == original == model_from_hf(form)
    assert for_both_versions(both) == both
    top, text = both, both.get("text_config", both)
    assert text["rope_theta"] == original.language.rope_theta
    assert text["rope_scaling"]["mrope_section"] == list(original.language.mrope_section)
    assert text["rope_scaling"].get("rope_type", text["rope_scaling"].get("type")) in ("default", "mrope")
    assert "rope_theta" not in text["rope_scaling"]  # 4.57 reports it as a mistake
    assert bool(top.get("tie_word_embeddings", False)) == original.language.tied
    assert bool(text.get("tie_word_embeddings", False)) == original.language.tied
    assert top.get("dtype", top.get("torch_dtype")) == "bfloat16"


def test_transformers_finds_no_difference(form):
    """transformers 5 prefers the added ``rope_scaling`` to its own ``rope_parameters``."""
    before, after = Qwen2_5_VLConfig(**deepcopy(form)), Qwen2_5_VLConfig(**deepcopy(for_both_versions(form)))
    added = {"tie_word_embeddings", "rope_theta"}  # in the text config, where 5 ignores them
    text = {key: value for key, value in after.text_config.to_dict().items() if key not in added}
    assert text == {key: value for key, value in before.text_config.to_dict().items() if key not in added}
    assert after.vision_config.to_dict() == before.vision_config.to_dict()
    assert {**after.to_dict(), "text_config": None} == {**before.to_dict(), "text_config": None}


@pytest.mark.parametrize(("top", "text", "tied"), [
    (None, None, None), (False, None, False), (None, False, False), (True, None, True), (None, True, True),
    (False, True, True), (True, False, True)])
def test_either_place_makes_it_tied(top, text, tied):
    config = {"text_config": {"vocab_size": 8} | ({} if text is None else {"tie_word_embeddings": text})}
    config |= {} if top is None else {"tie_word_embeddings": top}
    assert is_tied(config) is tied
    assert Qwen2_5_VLConfig(**deepcopy(config)).tie_word_embeddings is bool(tied)
    both = for_both_versions(config)
    assert both == config if not tied else both["tie_word_embeddings"] and both["text_config"]["tie_word_embeddings"]


@pytest.mark.parametrize("key", ["hidden_size", "num_key_value_heads", "vocab_size"])
def test_a_missing_size_is_named(saved, key):
    config = json.loads((saved / "config.json").read_text())
    del config["text_config"][key]
    with pytest.raises(UserError, match=f"config.json lacks '{key}'"):
        model_from_hf(config)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_a_scaled_rotary_embedding_is_refused(key, saved):
    """It would be trained as the plain one."""
    config = flat(HFDirectory.open(saved).config)
    config["rope_scaling"] = {**config["rope_scaling"], key: "yarn", "factor": 4.0}
    with pytest.raises(UserError, match=r"asks for the rotary embedding .*yarn"):
        model_from_hf(config)


@pytest.mark.parametrize("otherwise", [False, True])
def test_every_bad_value_is_named(saved, otherwise):
    config = flat(HFDirectory.open(saved).config)
    model = model_from_hf(config) if otherwise else None
    config |= {"hidden_size": "abc", "num_hidden_layers": 0, "image_token_id": [1]}
    config["vision_config"] = {**config["vision_config"], "depth": True, "hidden_size": {}, "spatial_merge_size": "2"}
    with pytest.raises(UserError) as caught:
        model_from_hf(config, model)
    assert caught.value.problems == (
        "config.json: depth is true; expected an integer of at least 1 and at most 1000.",
        "config.json: hidden_size is {}; expected an integer of at least 1.",
        'config.json: spatial_merge_size is "2"; expected an integer of at least 1.',
        "config.json: num_hidden_layers is 0; expected an integer of at least 1 and at most 1000.",
        'config.json: hidden_size is "abc"; expected an integer of at least 1.',
        "config.json: image_token_id is [1]; expected an integer of at least 0.",
    )


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
