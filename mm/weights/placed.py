"""Which slot of a placement owns which weights."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import groupby

from mm.config.model import ModelConfig
from mm.placement import StageSpec
from mm.weights.table import OUTPUT_LAYER_NAME, Place, Weight, model_weights, vocabulary


@cache
def weights_by_place(model: ModelConfig) -> Mapping[tuple[Place, int | None], tuple[Weight, ...]]:
    """``model_weights`` by place and layer, in model order."""
    return {place: tuple(weights)
            for place, weights in groupby(model_weights(model), key=lambda one: (one.place, one.layer))}


def stage_weights(model: ModelConfig, spec: StageSpec) -> tuple[Weight, ...]:
    """The weights that the slot ``spec`` owns, in model order.

    In a tied model whose embedding and head live in different slots, the head's slot also owns
    ``text_decoder.output_layer.weight``: a copy of the embedding, read from the embedding's Hugging Face tensor.
    """
    owned = [weight for place, weights in weights_by_place(model).items() if owns(spec, *place) for weight in weights]
    if spec.has_head and model.language.tied and not spec.has_embedding:
        copy = vocabulary(model.language, Place.HEAD, OUTPUT_LAYER_NAME, model.family.weights.embedding_weight)
        owned.append(replace(copy, is_tied_copy=True))
    return tuple(owned)


def owns(spec: StageSpec, place: Place, layer: int | None) -> bool:
    """Whether the slot ``spec`` holds a place of the model."""
    owned = getattr(spec, place.value)
    return owned if layer is None else layer in owned
