"""How many parameters of each block of a model one rank holds."""

import math
from collections.abc import Mapping, Sequence
from functools import cache

from mm.config.model import ModelConfig
from mm.weights.memory import memory_shape
from mm.weights.placed import weights_by_place
from mm.weights.table import Place, Weight
from mm.weights.trained import is_frozen


@cache
def params_by_place(model: ModelConfig, tp_size: int) -> Mapping[tuple[Place, int | None], tuple[int, int, int]]:
    """``params_of`` of each block, by its place and layer."""
    return {place: params_of(weights, model, tp_size) for place, weights in weights_by_place(model).items()}


def params_of(weights: Sequence[Weight], model: ModelConfig, tp_size: int) -> tuple[int, int, int]:
    """Numbers of parameters on one rank, with padding: of ``weights``; of those that are trained; and of trained ones
    that belong to a whole encoder."""
    found = [(math.prod(memory_shape(weight, tp_size)), not is_frozen(weight, model), weight.is_whole)
             for weight in weights]
    return (sum(size for size, _, _ in found), sum(size for size, is_trained, _ in found if is_trained),
            sum(size for size, is_trained, is_whole in found if is_trained and is_whole))
