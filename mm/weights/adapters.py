"""Adapters of the whole model: which linear layers have them, and what is wrong with the patterns that name layers.

The matrices themselves are weights of ``mm.weights.table``.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig
from mm.errors import nearest
from mm.weights.names import ALL_LINEAR, chosen, is_target
from mm.weights.table import Weight, is_linear, layer_names, model_weights
from mm.weights.trained import is_frozen


@dataclass(frozen=True)
class AdapterWeights:
    """One linear layer of Hugging Face's model and the two matrices beside it."""

    layer: str
    """Published name: ``model.layers.0.self_attn.q_proj``."""
    base: Weight
    """Our weight, which contains the layer's."""
    a: Weight
    b: Weight
    alpha: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        assert self.a.scale is not None, "an adapter's matrix"
        return self.a.scale


def model_adapters(model: ModelConfig) -> tuple[AdapterWeights, ...]:
    """Every adapter of the model, in model order."""
    found: list[AdapterWeights] = []
    for base, a, b in matrix_pairs(model_weights(model)):
        hf_name = layer_weight(a)
        alpha = chosen(model.lora.alpha_pattern, layer_names(hf_name, base), model.lora.alpha)
        found.append(AdapterWeights(hf_name.removesuffix(".weight"), base, a, b, alpha))
    return tuple(found)


def matrix_pairs(weights: Iterable[Weight]) -> Iterator[tuple[Weight, Weight, Weight]]:
    """For each adapter among ``weights``, in model order: the weight that it belongs to, its A and its B."""
    base = a = None
    for weight in weights:
        if not weight.is_adapter:
            base, a = weight, None
        elif a is None:
            a = weight
        else:
            assert base is not None, "adapters follow their weight"
            yield base, a, weight
            a = None


def layer_weight(matrix: Weight) -> str:
    """The Hugging Face name of the weight that an adapter's ``matrix`` (A or B) belongs to."""
    return f"{matrix.hf_names[0].rpartition('.lora_')[0]}.weight"


def num_adapter_params(model: ModelConfig) -> int:
    """Numbers in all matrices of adapters, without padding and copies."""
    return sum(math.prod(one.shape) for adapter in model_adapters(model) for one in (adapter.a, adapter.b))


def adapter_problems(model: ModelConfig) -> Iterator[str]:
    """Patterns that match no layer, or only layers without a possible adapter; trained weights of adapted layers."""
    lora = model.lora
    if not lora.is_on:
        return
    found = model_adapters(model)
    for pattern in lora.target_modules:
        yield from _target_problems(model, pattern)
    for flag, pairs in (("--lora-rank-pattern", lora.rank_pattern), ("--lora-alpha-pattern", lora.alpha_pattern)):
        for pattern, _ in pairs if found else ():  # without any adapter, the targets are what is wrong
            if not any(is_target(pattern, layer_names(f"{one.layer}.weight", one.base)) for one in found):
                yield (f"{flag} has {pattern!r}, which matches no layer with an adapter"
                       f"{_nearest_layers(pattern, [one.base for one in found])}")
    layers = {one.base.name.removesuffix(".weight") for one in found}
    trained = [one.name for one in model_weights(model) if not one.is_adapter and not is_frozen(one, model)
               and one.name.rpartition(".")[0] in layers]
    if trained:
        yield (f"--trainable-modules {' '.join(model.trainable_modules)} trains {trained[0]}, whose layer has an "
               f"adapter; PEFT cannot represent that as LoRA; exclude that layer from --lora-target-modules, or narrow "
               f"--trainable-modules")


def _target_problems(model: ModelConfig, pattern: str) -> Iterator[str]:
    """Why ``pattern`` alone gives no adapter."""
    flag, only = "--lora-target-modules", replace(model, lora=replace(model.lora, target_modules=(pattern,)))
    if model_adapters(only):
        return
    named = [weight for weight in model_weights(model.base)
             if weight.name.endswith(".weight") and len(weight.shape) > 1 and
             any(is_target(pattern, layer_names(name, weight)) for name in weight.hf_names)]
    if not named:
        linear = [weight for weight in model_weights(model.base) if is_linear(weight)]
        yield f"{flag} has {pattern!r}, which matches no linear layer{_nearest_layers(pattern, linear)}"
    elif not any(map(is_linear, named)):
        yield (f"{flag} has {pattern!r}, which matches {named[0].name}; only the linear layers of the ViT, the "
               f"projector and the LLM can have adapters, not the word embedding and the output layer")
    elif all(weight.part not in model.lora.parts for weight in named):
        words = ", ".join(model.lora.apply_modules)
        yield (f"{flag} has {pattern!r}, which only matches layers, such as {named[0].name}, of parts that are not in "
               f"lora_apply_modules ({words}) and that lora_mixed_training trains fully; add the part, or remove the "
               f"pattern")
    else:
        yield (f"{flag} has {pattern!r}, which matches frozen layers only, such as {named[0].name}: frozen parts have "
               f"no adapters, as in MindSpeed-MM; set freeze to false there (layers with adapters stay frozen), "
               f"shorten freeze_layers or --freeze-modules, or remove the pattern")


def _nearest_layers(pattern: str, weights: list[Weight]) -> str:
    """For a message: the nearest name of a layer; words of one to a word, whole names to a longer pattern."""
    names = {name for weight in weights for hf_name in weight.hf_names for name in layer_names(hf_name, weight)}
    words = {name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdecimal()}
    hint = nearest(pattern, sorted(names if "." in pattern else words))
    return hint or f"; write {ALL_LINEAR} for all, or one of the words that end their names: {', '.join(sorted(words))}"


def describe(lora: LoraConfig) -> str:
    """For reports: ``rank 8, alpha 16``."""
    rs = ", rsLoRA" if lora.use_rslora else ""
    others = ", other ranks or alphas for some" if lora.rank_pattern or lora.alpha_pattern else ""
    return f"rank {lora.r}, alpha {lora.alpha:g}{rs}{others}"
