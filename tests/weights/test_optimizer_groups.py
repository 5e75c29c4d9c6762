"""Which weight is in which group, and which words of the command line are refused."""

import dataclasses
from collections import Counter

import pytest

from mm.config.args import parse
from mm.config.model import ModelConfig, Rates
from mm.weights.table import OUTPUT_LAYER_NAME, matches, model_weights, stage_weights
from mm.weights.trained import Group, group_facts, group_of, group_problems, optimizer_groups
from tests.tiny import our_config

ARGV = ["--mm-model", "m", "--mm-data", "d", "--micro-batch-size", "1", "--seq-length", "8", "--train-iters", "1",
        "--lr", "1e-3", "--weight-decay", "0.1"]


def model_of(tied: bool = False, freeze: tuple[str, ...] = (), **rates: Rates) -> ModelConfig:
    model = our_config(((4,),), ((4,),), tied, freeze)
    return dataclasses.replace(
        model, **{part: dataclasses.replace(getattr(model, part), rates=own) for part, own in rates.items()})


def group(name: str, model: ModelConfig, *flags: str) -> tuple[float, float]:
    weight = next(one for one in model_weights(model) if one.name == name)
    return dataclasses.astuple(group_of(weight, parse([*ARGV, *flags]), model))


@pytest.mark.parametrize(("pattern", "name", "found"), [
    ("Norm", "text_decoder.decoder.final_layernorm.weight", True),
    ("layers.1", "a.layers.1.b", True),
    ("layers.1", "a.layers.11.b", True),  # as MindSpeed-MM's keywords
    ("layers.1.", "a.layers.11.b", False),
    ("layers.[01].", "a.layers.1.b", True),
    ("decoder*weight", "text_decoder.output_layer.weight", True),
    ("a?b", "ab", False),
])  # fmt: skip
def test_matching(pattern: str, name: str, found: bool) -> None:
    assert matches(pattern, name) is found


VIT, PROJECTOR, LLM = (
    "image_encoder.encoder.blocks.layers.2.mlp.linear_fc1.weight", "image_encoder.projector.encoder.linear_fc1.weight",
    "text_decoder.decoder.layers.2.mlp.linear_fc1.weight")  # fmt: skip


def test_rates_of_parts() -> None:
    model = model_of(vision=Rates(1e-5), projector=Rates(weight_decay=0.5))
    assert group(VIT, model) == (1e-5, 0.1) and group(PROJECTOR, model) == (1e-3, 0.5)
    assert group(LLM, model) == (1e-3, 0.1)
    assert group(VIT.replace("weight", "bias"), model) == (1e-5, 0.0)
    assert group("image_encoder.projector.layernorm.weight", model) == (1e-3, 0.0)


def test_patterns_multiply_the_rate_of_a_part_and_take_its_decay_away() -> None:
    model, flags = model_of(vision=Rates(1e-5)), ("--lr-scale-modules", "layers.2.", "output", "--lr-mult", "0.5")
    assert group(VIT, model, *flags) == (5e-6, 0.1) and group(LLM, model, *flags) == (5e-4, 0.1)
    assert group(OUTPUT_LAYER_NAME, model, *flags) == (5e-4, 0.1)
    assert group(PROJECTOR, model, *flags) == (1e-3, 0.1)
    assert group(VIT, model, "--weight-decay-exclude-modules", "BLOCKS", "bias") == (1e-5, 0.0)


def test_both_copies_of_a_tied_embedding_are_in_one_group() -> None:
    model = our_config(((4, 0),), ((1, 3),), tied=True)
    args = parse([*ARGV, "--lr-scale-modules", "word_embeddings", "--lr-mult", "2"])
    held = [weight for spec in model.placement().slots for weight in stage_weights(model, spec)]
    groups = {weight.name: group_of(weight, args, model) for weight in held if "word_emb" in weight.name or
              weight.name == OUTPUT_LAYER_NAME}
    assert len(groups) == 2 and set(groups.values()) == {Group(2e-3, 0.1)}


def test_every_trained_weight_is_in_one_group() -> None:
    model = model_of(freeze=("projector",), vision=Rates(1e-5))
    args = parse([*ARGV, "--lr-scale-modules", "norm", "--lr-mult", "3"])
    groups = optimizer_groups(args, model)
    trained = [weight.name for weight in model_weights(model) if weight.part != "projector"]
    assert Counter(weight.name for weights in groups.values() for weight in weights) == Counter(trained)
    assert {dataclasses.astuple(one) for one in groups} == {
        (1e-5, 0.1), (1e-5, 0.0), (3 * 1e-5, 0.0), (1e-3, 0.1), (1e-3, 0.0), (3 * 1e-3, 0.0)}
    facts = group_facts(args, model)
    assert [name for one in facts for name in one["weights"]] == [w.name for ws in groups.values() for w in ws]
    assert facts[0].keys() == {"max_lr", "weight_decay", "num_parameters", "weights"}
    assert facts[1]["num_parameters"] == 4 * 2 * 32


@pytest.mark.parametrize(("words", "what"), [
    (["layernrom"], "has 'layernrom', which matches no weight name (did you mean 'layernorm'?)"),
    (["vision"], "names start with image_encoder.encoder, image_encoder.projector, text_decoder.embedding"),
    (["mlp", "merger"], "names it matches image_encoder.projector.layernorm.weight and others"),
])  # fmt: skip
@pytest.mark.parametrize("flag", ["--lr-scale-modules", "--weight-decay-exclude-modules"])
def test_words_that_change_nothing_are_refused(flag: str, words: list[str], what: str) -> None:
    (problem,) = group_problems(parse([*ARGV, flag, *words]), model_of())
    assert problem.startswith(f"{flag} has ") and what in problem
