"""What is frozen by part, layer and pattern, where the gradient of a loss goes then, and which words are refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.config.model import ModelConfig
from mm.weights.table import OUTPUT_LAYER_NAME, Place, model_weights, stage_weights
from mm.weights.trained import GradientPath, feature_cache_problems, freeze_notes, freeze_problems, is_frozen
from tests.tiny import our_config

PARTS = ("vision", "projector", "language")


def model_of(freeze: tuple[str, ...] = (), vision: str = "", language: str = "", tied: bool = False,
             **patterns: Any) -> ModelConfig:
    """The small model, each tower on one stage of its own, with frozen parts, layers and patterns."""
    return our_config(((2, 2, 0, 0),), ((0, 0, 2, 2),), tied, freeze, (vision, language), **patterns)


def trained(model: ModelConfig) -> list[str]:
    return [weight.name for weight in model_weights(model) if not is_frozen(weight, model)]


def test_a_layer_is_frozen_with_all_of_its_weights_and_nothing_beside_it() -> None:
    model = model_of(vision="0-1,3")
    names = trained(model)
    assert {name.split(".")[4] for name in names if ".blocks." in name} == {"2"}
    assert "image_encoder.encoder.patch_embed.proj.weight" in names
    assert len(trained(model_of())) - len(names) == 3 * 10


def test_patterns_freeze_and_train_against_parts_and_layers() -> None:
    assert not [name for name in trained(model_of(freeze_modules=("NORM",))) if "norm" in name]
    names = trained(model_of(PARTS[:2], language="0-3", freeze_modules=("embedding",),
                             trainable_modules=("layers.3.mlp", "projector*norm")))
    assert names == [
        *(f"image_encoder.encoder.blocks.layers.3.mlp.linear_{end}" for end in (
            "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")), "image_encoder.projector.layernorm.weight",
        *(f"text_decoder.decoder.{end}.weight" for end in (
            "layers.3.mlp.linear_fc1", "layers.3.mlp.linear_fc2", "final_layernorm")), OUTPUT_LAYER_NAME]


def test_both_copies_of_a_tied_embedding_are_frozen_together() -> None:
    model = model_of(tied=True, freeze_modules=("word_embeddings",))
    held = [weight for spec in model.placement().slots for weight in stage_weights(model, spec)]
    assert sum(is_frozen(weight, model) for weight in held) == 2
    assert is_frozen(held[-1], model) and held[-1].name == OUTPUT_LAYER_NAME


EMBEDDING, PATCH = "word_embeddings", "patch_embed"
PATHS: list[tuple[dict, tuple[str, str]]] = [
    # whether a gradient comes back to stages 0, 1 and 2 of 4 for a microbatch with images, then for text
    ({}, ("111", "001")),
    ({"freeze": ("vision",)}, ("011", "001")),
    ({"freeze": ("vision", "projector")}, ("001", "001")),
    ({"freeze": ("language",)}, ("111", "000")),
    ({"freeze": ("vision", "language")}, ("011", "000")),
    ({"vision": "0-1"}, ("111", "001")),  # for the sake of the patch embedding
    ({"vision": "0-1", "freeze_modules": (PATCH,)}, ("011", "001")),
    ({"vision": "0", "freeze_modules": (PATCH,)}, ("111", "001")),
    ({"freeze": ("vision", "projector"), "language": "0-1"}, ("001", "001")),  # of the embedding
    ({"freeze": ("vision", "projector"), "language": "0-1", "freeze_modules": (EMBEDDING,)}, ("000", "000")),
    ({"language": "0-1", "freeze_modules": (EMBEDDING,)}, ("111", "000")),
    ({"freeze": ("vision", "projector", "language"), "trainable_modules": ("blocks.layers.3.",)}, ("011", "000")),
    ({"freeze": ("vision", "projector", "language"), "trainable_modules": ("output_layer",)}, ("000", "000")),
    ({"freeze": ("vision", "projector", "language"), "trainable_modules": ("projector*bias",)}, ("011", "000")),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "expected"), PATHS)
def test_gradients_cross_the_boundaries_behind_the_first_trained_weight(settings: dict, expected: tuple) -> None:
    model = model_of(**settings)
    path, slots = GradientPath.of(model), model.placement().slots
    for has_images, crosses in zip((True, False), expected, strict=True):
        assert "".join(str(int(path.comes_back(spec, has_images))) for spec in slots) == f"{crosses}0"
        assert "".join(str(int(path.leaves(spec, has_images))) for spec in slots) == f"0{crosses}"


@given(st.sets(st.sampled_from([weight.name for weight in model_weights(model_of())]), min_size=1))
def test_what_needs_an_input_gradient_has_something_trained_before_it(names: set[str]) -> None:
    """Against the order of the table, which is that of the forward pass but for the two starts."""
    model = model_of(PARTS, trainable_modules=tuple(names))
    found = {name: place for place, weights in _places(model).items() for name in weights}
    path, places = GradientPath.of(model), list(_places(model))
    for index, (place, layer) in enumerate(places):
        if place not in (Place.PATCH_EMBEDDING, Place.EMBEDDING):
            assert path.needs_input_gradient(place, layer) == any(found[name] in places[:index] for name in names)


def _places(model: ModelConfig) -> dict[tuple[Place, int | None], list[str]]:
    places: dict[tuple[Place, int | None], list[str]] = {}
    for weight in model_weights(model):
        places.setdefault((weight.place, weight.layer), []).append(weight.name)
    return places


@pytest.mark.parametrize(("settings", "what"), [
    ({"freeze_modules": ("layernrom",)}, "--freeze-modules has 'layernrom', which matches no weight name (did you "
                                         "mean 'layernorm'?)"),
    ({"trainable_modules": ("merger",)}, "in Hugging Face's names it matches image_encoder.projector"),
    ({"freeze": ("vision", "projector"), "language": "0-3", "freeze_modules": ("embedding", "final", "output")},
     "every weight is frozen, so there is nothing to train; set freeze to false"),
    ({"freeze": PARTS}, "every weight is frozen, so there is nothing to train"),
])  # fmt: skip
def test_words_that_change_nothing_are_refused(settings: dict, what: str) -> None:
    (problem,) = freeze_problems(model_of(**settings))
    assert what in problem


@pytest.mark.parametrize(("settings", "what"), [
    ({}, "41 of the ViT's weights are trained, such as image_encoder.encoder.patch_embed.proj.weight: set "
         "image_encoder.vision_encoder.freeze to true in the model JSON, or remove the flag"),
    ({"vision": "0-3"}, "1 of the ViT's weights are trained"),
    ({"vision": "0-2", "freeze_modules": (PATCH,)},
     "10 of the ViT's weights are trained, such as image_encoder.encoder.blocks.layers.3."),
    ({"freeze": PARTS[:1], "trainable_modules": ("3.mlp", "final")}, ": remove '3.mlp' from --trainable-modules, or"),
])  # fmt: skip
def test_features_are_kept_of_a_vit_that_is_wholly_frozen(settings: dict, what: str) -> None:
    (problem,) = feature_cache_problems(model_of(**settings))
    assert what in problem and problem.startswith("--vision-feature-cache ")


@pytest.mark.parametrize("settings", [
    {"freeze": PARTS[:1]}, {"freeze": PARTS[:2]}, {"vision": "0-3", "freeze_modules": ("patch_embed",)},
    {"freeze_modules": ("image_encoder.encoder",)}, {"freeze": PARTS[:1], "trainable_modules": ("projector",)},
])  # fmt: skip
def test_the_projector_may_be_trained(settings: dict) -> None:
    assert list(feature_cache_problems(model_of(**settings))) == []


@pytest.mark.parametrize(("settings", "num_notes"), [
    ({"vision": "0-1"}, 1), ({"vision": "0", "freeze_modules": (PATCH,)}, 0), ({"vision": "1"}, 0),
    ({"language": "0"}, 0), ({"freeze": PARTS[:2], "language": "0"}, 1), ({"freeze_modules": ("norm",)}, 0),
])  # fmt: skip
def test_a_trained_embedding_before_frozen_layers_is_noted(settings: dict, num_notes: int) -> None:
    notes = list(freeze_notes(model_of(**settings)))
    assert len(notes) == num_notes and all("embed" in note.partition("--freeze-modules")[2] for note in notes)
