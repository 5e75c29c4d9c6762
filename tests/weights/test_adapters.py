"""Which layers have adapters, how these are cut, and what is said of patterns that name none."""

from dataclasses import replace

import pytest
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import Qwen2_5_VLForConditionalGeneration

from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig
from mm.weights.table import EMBEDDING_NAME, OUTPUT_LAYER_NAME, is_target, live_name, model_weights, stage_weights
from mm.weights.trained import GradientPath, adapter_problems, is_frozen, model_adapters, saved_among, saved_weights
from tests.peft_oracle import peft_config
from tests.tiny import hf_model, our_config


def model_of(*targets: str, **others: object) -> ModelConfig:
    lora = {key: others.pop(key) for key in list(others) if key in LoraConfig.__dataclass_fields__}
    return replace(our_config(((4,),), ((4,),)), lora=LoraConfig(targets, **lora), **others)


def layers(model: ModelConfig) -> list[str]:
    return [one.layer for one in model_adapters(model)]


@pytest.fixture(scope="module")
def live() -> list[str]:
    """Names of the linear layers, and of the patch embedding, in transformers' live module."""
    model: Qwen2_5_VLForConditionalGeneration = hf_model()
    return [name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv3d")]


@pytest.mark.parametrize("pattern", ["q_proj", "qkv", "proj", "mlp.0", "layers.3.mlp.up_proj", "down_proj",
                                     "visual.blocks.1.attn.qkv", "model.language_model.layers.0.self_attn.o_proj"])
def test_a_pattern_names_what_it_names_in_peft(pattern: str, live: list[str]) -> None:
    found = model_adapters(model_of(pattern))
    ours = {live_name(one.layer) for one in found}
    assert ours == {name for name in live if name == pattern or name.endswith(f".{pattern}")} != set()


def test_all_linear_is_pefts(live: list[str]) -> None:
    ours = {live_name(one.layer) for one in model_adapters(model_of("all-linear"))}
    assert ours == set(live) - {"lm_head", "model.visual.patch_embed.proj"}


def test_our_names_spans_and_wildcards() -> None:
    assert layers(model_of("layers.1-2.self_attention.linear_qkv")) == [
        "visual.blocks.1.attn.qkv", "visual.blocks.2.attn.qkv",
        *(f"model.layers.{layer}.self_attn.{kind}_proj" for layer in (1, 2) for kind in "qkv")]
    assert layers(model_of("model.layers.[03].*.[kv]_proj")) == [
        f"model.layers.{layer}.self_attn.{kind}_proj" for layer in (0, 3) for kind in "kv"]
    assert is_target("blocks.0-11.attn.qkv", ["visual.blocks.10.attn.qkv"])
    assert not is_target("blocks.0-1.attn.qkv", ["visual.blocks.10.attn.qkv"])
    assert not is_target("q_proj", ["model.layers.0.self_attn.xq_proj"])


def test_ranks_and_alphas_by_pattern() -> None:
    model = model_of("q_proj", "v_proj", r=4, alpha=8.0, rank_pattern=(("layers.1.*", 2), ("v_proj", 6)),
                     alpha_pattern=(("v_proj", 12.0),))
    found = {one.layer: (one.rank, one.scale) for one in model_adapters(model)}
    assert found["model.layers.0.self_attn.q_proj"] == (4, 2.0)
    assert found["model.layers.0.self_attn.v_proj"] == (6, 2.0)
    assert found["model.layers.1.self_attn.v_proj"] == (2, 6.0)
    assert set(peft_config(model).rank_pattern.values()) == {2, 4, 6}


def test_patterns_of_ranks_and_alphas_name_what_they_name_in_peft() -> None:
    """PEFT is given the same patterns, not the names that we find."""
    ranks, alphas = {"k_proj": 2, "up_proj": 5}, {"gate_proj": 9}
    kinds = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    peft = get_peft_model(hf_model(), PeftConfig(target_modules=kinds, r=4, lora_alpha=6, rank_pattern=ranks,
                                                 alpha_pattern=alphas))
    theirs = {name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
              for name, module in peft.named_modules() if isinstance(module, LoraLayer)}
    model = model_of(*kinds, r=4, alpha=6.0, rank_pattern=tuple(ranks.items()), alpha_pattern=tuple(alphas.items()))
    assert {live_name(one.layer): (one.rank, one.scale) for one in model_adapters(model)} == theirs
    assert {value for value in theirs.values()} == {(4, 1.5), (2, 3.0), (5, 1.2), (4, 2.25)}


def test_what_is_trained_and_saved_are_the_adapters() -> None:
    model = model_of("all-linear")
    assert all(is_frozen(one, model) != one.is_adapter for one in model_weights(model))
    assert saved_weights(model) == tuple(one for one in model_weights(model) if one.is_adapter)
    assert saved_weights(model.base) == model_weights(model.base)


def test_both_copies_of_a_tied_embedding_that_is_trained_beside_adapters_are_saved() -> None:
    model = replace(our_config(((4, 0),), ((2, 2),), tied=True), lora=LoraConfig(("q_proj",)),
                    trainable_modules=("word_embeddings",))
    copies = [[one.name for one in saved_among(stage_weights(model, spec), model) if not one.is_adapter]
              for spec in model.placement().slots]
    assert copies == [[EMBEDDING_NAME], [OUTPUT_LAYER_NAME]]


def test_mixed_training_trains_the_parts_without_adapters_in_whole() -> None:
    model = model_of("all-linear", mixed_training=True, apply_modules=("text_decoder",))
    assert {one.base.part for one in model_adapters(model)} == {"language"}
    assert {one.part for one in model_weights(model) if not one.is_adapter and not is_frozen(one, model)} == {
        "vision", "projector"}


def test_frozen_parts_and_layers_have_no_adapters() -> None:
    model = model_of("all-linear")
    frozen = replace(model, vision=replace(model.vision, freeze=True),
                     language=replace(model.language, freeze_layers="0-2"), freeze_modules=("linear_fc",))
    assert layers(frozen) == [f"model.layers.3.self_attn.{kind}_proj" for kind in "qkvo"]


def test_gradients_go_back_to_the_first_adapter() -> None:
    assert GradientPath.of(model_of("layers.2.mlp.up_proj")) == GradientPath(float("inf"), 2)
    assert GradientPath.of(model_of("blocks.1.attn.qkv")) == GradientPath(1, float("inf"))


PROBLEMS = {
    "q_prj": "matches no linear layer (did you mean 'q_proj'?)",
    "all": "matches no linear layer; write all-linear for all, or one of the words that end their names: down_proj,",
    "layers.9.mlp.up_proj": "matches no linear layer (did you mean",
    "lm_head": "matches text_decoder.output_layer.weight; only the linear layers",
    "embed_tokens": "not the word embedding and the output layer",
    "qkv": "matches frozen layers only, such as image_encoder.encoder.blocks.layers.0.self_attention.linear_qkv.weight",
}


@pytest.mark.parametrize("pattern", PROBLEMS)
def test_a_pattern_without_a_layer_is_explained(pattern: str) -> None:
    model = model_of(pattern, "q_proj")
    model = replace(model, vision=replace(model.vision, freeze=True))
    (problem,) = adapter_problems(model)
    assert problem.startswith(f"--lora-target-modules has {pattern!r}, which ") and PROBLEMS[pattern] in problem
