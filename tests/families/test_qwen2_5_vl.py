"""A checkpoint that transformers would compute differently is rejected, whichever key of config.json causes it."""

import dataclasses

import pytest
from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl as configs

from mm.checkpoint.hf_config import model_from_hf
from mm.errors import UserError
from mm.families.qwen2_5_vl import FIXED, KEYS, fixed_problems, published_config

# Keys without effect on training: names, generation, classification, initial values, and sliding windows of the LLM,
# which use_sliding_window (always false) would enable.
HARMLESS = """
_name_or_path architectures bos_token_id dtype eos_token_id id2label initializer_range label2id max_window_layers
model_type output_attentions output_hidden_states pad_token_id problem_type return_dict sliding_window
transformers_version use_cache vision_end_token_id
"""
ELSEWHERE = {"text_config", "vision_config", "rope_parameters", "layer_types", "tie_word_embeddings"}


@pytest.mark.parametrize(("cls", "part"), [
    (configs.Qwen2_5_VLConfig, "text"), (configs.Qwen2_5_VLTextConfig, "text"),
    (configs.Qwen2_5_VLVisionConfig, "vision"),
])
def test_every_key_that_transformers_reads_is_handled(cls, part):
    read = {field.name for field in dataclasses.fields(cls)} | cls().to_dict().keys()
    understood = {name for key in KEYS.values() for name in key.names
                  if key.section in (part, "top" if part == "text" else part)}
    assert read - understood - FIXED[part].keys() - set(HARMLESS.split()) - ELSEWHERE == set()


def nested(**text):
    """The published 3B in the form of transformers 5."""
    flat = published_config("3B")
    top = {"model_type": flat["model_type"], "tie_word_embeddings": True, "vision_config": flat.pop("vision_config")}
    return top | {"text_config": flat | text}


SCALED = [{"rope_type": "yarn", "factor": 4.0, "mrope_section": [16, 24, 24]}, {"type": "linear", "factor": 2.0},
          {"type": "dynamic"}, {"rope_type": "longrope", "type": "mrope"}]


@pytest.mark.parametrize("rope", SCALED, ids=str)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_rotary_embeddings_in_every_spelling(rope, key):
    for config in (published_config("3B") | {key: rope}, nested(**{key: rope}), nested() | {key: rope}):
        with pytest.raises(UserError, match=f"asks for the rotary embedding .*{key}"):
            model_from_hf(config)


@pytest.mark.parametrize(("changes", "what"), [
    ({"use_sliding_window": True}, "use_sliding_window is True; expected False"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
    ({"attention_dropout": 0.1}, "attention_dropout is 0.1; expected 0"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has"),
    ({"layer_types": [["full_attention"]]}, "layer_types has"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24], "partial_rotary_factor": 0.5}},
     "rope_scaling.partial_rotary_factor is 0.5"),
])
def test_another_llm(changes, what):
    for config in (published_config("3B") | changes, nested(**changes)):
        with pytest.raises(UserError, match=what):
            model_from_hf(config)


@pytest.mark.parametrize(("changes", "what"), [
    ({"hidden_act": "quick_gelu"}, "vision_config.hidden_act is 'quick_gelu'"),
    ({"rope_parameters": {"rope_theta": 5000.0, "rope_type": "axial"}}, "rope_parameters.rope_theta is 5000.0"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "asks for the rotary embedding"),
])
def test_another_vit(changes, what):
    config = nested()
    config["vision_config"] |= changes
    with pytest.raises(UserError, match=what):
        model_from_hf(config)


def test_configs_of_both_versions_are_accepted():
    assert list(fixed_problems(published_config("7B"))) == [] == list(fixed_problems(nested()))
    saved = configs.Qwen2_5_VLConfig(**published_config("3B")).to_dict()
    assert list(fixed_problems(saved)) == []
    assert model_from_hf(saved) == model_from_hf(published_config("3B"))
