"""What is trained: frozen weights, adapters, how far back gradients flow, and the groups of the optimizer.

The only place that decides what is frozen.  The matrices of adapters are weights of ``mm.weights.table``.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from mm.config.args import Arguments
from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig
from mm.errors import nearest
from mm.placement import Message, StageSpec
from mm.weights.table import (
    ALL_LINEAR,
    VISION_PLACES,
    Place,
    Weight,
    chosen,
    is_held,
    is_linear,
    is_target,
    layer_names,
    matches,
    model_weights,
    stored_name,
)


def is_frozen(weight: Weight, model: ModelConfig) -> bool:
    """Whether a weight is not trained.

    A weight is frozen by its part, its layer or a pattern, or because adapters are trained in its place, unless
    ``trainable_modules`` name it.  Both copies of a tied embedding are judged by the embedding's name.
    """
    if weight.is_adapter or any(matches(pattern, stored_name(weight)) for pattern in model.trainable_modules):
        return False
    return is_held(weight, model) or model.lora.freezes(weight.part)


def saved_weights(model: ModelConfig) -> tuple[Weight, ...]:
    """The weights in a training checkpoint: all, or with adapters only the trained ones."""
    weights = model_weights(model)
    return tuple(one for one in weights if not is_frozen(one, model)) if model.lora.is_on else weights


def saved_among(weights: Iterable[Weight], model: ModelConfig) -> list[Weight]:
    """The ``weights`` of a stage that a training checkpoint of ``model`` holds; of a tied embedding, both copies."""
    names = {weight.name for weight in saved_weights(model)}
    return [weight for weight in weights if stored_name(weight) in names]


def lacks_adapters(model: ModelConfig) -> bool:
    """Whether adapters are asked for, but no target names a layer that can have one."""
    return model.lora.is_on and not any(weight.is_adapter for weight in model_weights(model))


def _nearest_names(pattern: str, weights: Collection[Weight]) -> str:
    """Hint for a pattern that matched nothing: one of Hugging Face's names, a similar word, or how our names start."""
    foreign = [weight.name for weight in weights if any(matches(pattern, name) for name in weight.hf_names)]
    if foreign:
        return f"; in Hugging Face's names it matches {foreign[0]}{' and others' if len(foreign) > 1 else ''}"
    words = {word for weight in weights for word in weight.name.split(".") if not word.isdecimal()}
    starts = dict.fromkeys(".".join(weight.name.split(".")[:2]) for weight in weights)
    return nearest(pattern, sorted(words)) or f"; names start with {', '.join(starts)}"


def _unmatched(flag: str, patterns: Iterable[str], weights: Collection[Weight]) -> Iterator[str]:
    for pattern in patterns:
        if not any(matches(pattern, weight.name) for weight in weights):
            yield f"{flag} has {pattern!r}, which matches no weight name{_nearest_names(pattern, weights)}"


def freeze_problems(model: ModelConfig) -> Iterator[str]:
    """Patterns without effect, and a model in which nothing is trained, unless a wrong pattern explains that.

    ``adapter_problems`` reports wrong patterns for adapters.
    """
    weights = model_weights(model.base)
    unmatched = list(_unmatched("--trainable-modules", model.trainable_modules, weights))
    yield from (*_unmatched("--freeze-modules", model.freeze_modules, weights), *unmatched)
    if not (unmatched or lacks_adapters(model)) and all(is_frozen(weight, model) for weight in model_weights(model)):
        yield ("every weight is frozen, so there is nothing to train; set freeze to false in a part of the model JSON, "
               "shorten freeze_layers or --freeze-modules, or select weights with --trainable-modules")


def feature_cache_problems(model: ModelConfig) -> Iterator[str]:
    """Problems with storing ViT features: they change if any weight up to the ViT's last layer is trained."""
    found = [weight for weight in model_weights(model) if weight.part == "vision" and not is_frozen(weight, model)]
    if not found:
        return
    named = [pattern for pattern in model.trainable_modules
             if any(matches(pattern, stored_name(weight)) for weight in found)]
    how = [] if model.vision.freeze else ["set image_encoder.vision_encoder.freeze to true in the model JSON"]
    how += [f"remove {', '.join(map(repr, named))} from --trainable-modules"] if named else []
    yield (f"--vision-feature-cache keeps the ViT's output for each image, but {len(found)} of the ViT's weights are "
           f"trained, such as {found[0].name}: {' and '.join(how)}, or remove the flag (training the projector is "
           f"allowed)")


# Adapters


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
    base, rest = None, iter(weights)
    for weight in rest:
        if weight.is_adapter:
            assert base is not None, "adapters follow their weight"
            yield base, weight, next(rest)
        else:
            base = weight


def layer_weight(matrix: Weight) -> str:
    """The Hugging Face name of the weight that an adapter's ``matrix`` (A or B) belongs to."""
    return f"{matrix.hf_names[0].rpartition('.lora_')[0]}.weight"


def num_adapter_params(model: ModelConfig) -> int:
    """Parameters of all adapters, without padding and copies."""
    return sum(math.prod(one.shape) for one in model_weights(model) if one.is_adapter)


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


def describe_lora(lora: LoraConfig) -> str:
    """For reports: ``rank 8, alpha 16``."""
    rs = ", rsLoRA" if lora.use_rslora else ""
    others = ", other ranks or alphas for some" if lora.rank_pattern or lora.alpha_pattern else ""
    return f"rank {lora.r}, alpha {lora.alpha:g}{rs}{others}"


# How far back gradients flow


LAST = 2**30
"""Position of the projector, and of norm and head, on a ``GradientPath``: after every layer."""


def _position(place: Place, layer: int | None) -> int:
    if layer is not None:
        return layer
    return -1 if place in (Place.PATCH_EMBEDDING, Place.EMBEDDING) else LAST


@dataclass(frozen=True)
class GradientPath:
    """How far back the loss's gradient flows: on each of two paths, the position of the first trained weight.

    An embedding has position -1, layers have their numbers, and everything after the last layer has ``LAST``.  Infinity
    means that nothing on the path is trained.
    """

    vision: float
    """The path of the images: patch embedding, ViT layers, projector."""
    language: float
    """The path of the tokens: word embedding, LLM layers, norm and head."""

    @classmethod
    @cache
    def of(cls, model: ModelConfig) -> "GradientPath":
        first = {"vision": math.inf, "language": math.inf}
        for weight in model_weights(model):
            if not is_frozen(weight, model):
                tower = "language" if weight.part == "language" else "vision"
                first[tower] = min(first[tower], _position(weight.place, weight.layer))
        return cls(**first)

    def leaves(self, spec: StageSpec, has_images: bool) -> bool:
        """Whether the slot ``spec`` sends the gradient of a microbatch back to the slot before it."""
        return self._crosses(spec.receives, spec.vision_layers.start, spec.language_layers.start, has_images)

    def comes_back(self, spec: StageSpec, has_images: bool) -> bool:
        """Whether the slot ``spec`` receives the gradient of a microbatch from the slot after it."""
        return self._crosses(spec.sends, spec.vision_layers.stop, spec.language_layers.stop, has_images)

    @property
    def leads_to_images(self) -> bool:
        """Whether the gradient flows back into the visual tokens of a microbatch."""
        return self.vision < math.inf

    def needs_input_gradient(self, place: Place, layer: int | None = None, has_images: bool = True) -> bool:
        """Whether the input of a layer, or of another place, needs a gradient."""
        return self._begins_before(_position(place, layer), place, has_images)

    def flows_through(self, place: Place, layer: int | None = None) -> bool:
        """Whether a layer, or another place, has a backward pass in a microbatch with images."""
        return self._begins_before(_position(place, layer) + 1, place)

    def _begins_before(self, position: int, place: Place, has_images: bool = True) -> bool:
        """Whether a weight before ``position`` is trained, on the path of ``place`` or on the images' path into it."""
        if place in VISION_PLACES:
            return self.vision < position
        return (has_images and self.leads_to_images) or self.language < position

    def _crosses(self, message: Message, vision_layers: int, language_layers: int, has_images: bool) -> bool:
        """Whether the gradient crosses the boundary after this many layers of both towers."""
        match message:
            case Message.NOTHING:
                return False
            case Message.PATCHES:
                return has_images and self.vision < vision_layers
            case Message.VISUAL_TOKENS:
                return has_images and self.leads_to_images
            case Message.HIDDEN_STATES:
                return (has_images and self.leads_to_images) or self.language < language_layers


def freeze_notes(model: ModelConfig) -> Iterator[str]:
    """Where frozen first layers cost more than their forward pass, because the embedding before them is trained."""
    path = GradientPath.of(model)
    for place, first, tower in ((Place.PATCH_EMBEDDING, Place.VISION_LAYER, "vision"),
                                (Place.EMBEDDING, Place.LANGUAGE_LAYER, "language")):
        layer = [weight for weight in model_weights(model) if (weight.place, weight.layer) == (first, 0)]
        passes_anyway = tower == "language" and path.leads_to_images
        if getattr(path, tower) == -1 and not passes_anyway and all(is_frozen(weight, model) for weight in layer):
            name = next(weight.name for weight in model_weights(model) if weight.place is place)
            yield (f"the first layers are frozen, but {name} before them is trained, so gradients pass through all of "
                   f"them; freeze it too, with --freeze-modules {name}, and they cost only their forward pass")


# Optimizer groups


@dataclass(frozen=True, order=True)
class Group:
    """What Adam does to the weights of one group."""

    max_lr: float
    weight_decay: float


def group_of(weight: Weight, args: Arguments, model: ModelConfig) -> Group:
    """The group of a trained weight.  Both copies of a tied embedding are in the group that the embedding's name gives.

    The learning rate that the model JSON gives a part is the maximum of a scaled ``--lr`` schedule, like Megatron's
    ``lr_mult``; ``--lr-mult`` multiplies it.  Biases and norms get no weight decay, as in Megatron and transformers.
    """
    rates, name = getattr(model, weight.part).rates, stored_name(weight)
    lr = args.lr if rates.lr is None else rates.lr
    decay = args.weight_decay if rates.weight_decay is None else rates.weight_decay
    if any(matches(pattern, name) for pattern in args.lr_scale_modules):
        lr *= args.lr_mult
    is_excluded = any(matches(pattern, name) for pattern in args.weight_decay_exclude_modules)
    return Group(lr, 0.0 if is_excluded or len(weight.shape) == 1 else decay)


def optimizer_groups(args: Arguments, model: ModelConfig) -> dict[Group, list[Weight]]:
    """Every trained weight of the whole model, by group, in model order."""
    groups: dict[Group, list[Weight]] = {}
    for weight in model_weights(model):
        if not is_frozen(weight, model):
            groups.setdefault(group_of(weight, args, model), []).append(weight)
    return groups


def group_facts(args: Arguments, model: ModelConfig) -> list[dict[str, Any]]:
    """The groups as JSON values, for the file of a run: rates, size and names."""
    return [{**asdict(group), "num_parameters": sum(math.prod(weight.shape) for weight in weights),
             "weights": [weight.name for weight in weights]}
            for group, weights in optimizer_groups(args, model).items()]


def group_problems(args: Arguments, model: ModelConfig) -> Iterator[str]:
    """Patterns of the command line that match no weight, unless there is no adapter, which is reported elsewhere."""
    if not lacks_adapters(model):
        for flag, patterns in (("--lr-scale-modules", args.lr_scale_modules),
                               ("--weight-decay-exclude-modules", args.weight_decay_exclude_modules)):
            yield from _unmatched(flag, patterns, model_weights(model))
