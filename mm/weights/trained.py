"""Which weights are trained, and how far back through the model gradients therefore flow.

The only place that decides what is frozen: the stage, its messages, the optimizer, estimates of memory and FLOPs, and
the dry run ask here.

Which trained weight gets which learning rate and weight decay: the groups of the optimizer.

The model JSON may give a part a learning rate, which is the maximum for that part.  Its schedule is that of ``--lr``,
scaled, with warm-up and minimum.  Megatron's ``lr_mult`` does the same, and so does Qwen's trainer, whose scheduler
multiplies every group by one factor.  ``--lr-mult`` multiplies the rate of the part.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from typing import Any

from mm.config.args import Arguments
from mm.config.model import ModelConfig
from mm.errors import nearest
from mm.placement import Message, StageSpec
from mm.weights.names import matches
from mm.weights.table import VISION_PLACES, Place, Weight, is_held, model_weights, stored_name


def is_frozen(weight: Weight, model: ModelConfig) -> bool:
    """Whether a weight is not trained.

    A weight is frozen by its part, its layer or a pattern, or because adapters are trained in its place, unless
    ``trainable_modules`` name it.  Both copies of a tied embedding are judged by the embedding's name.
    """
    if weight.is_adapter or _matches_any(model.trainable_modules, weight):
        return False
    return is_held(weight, model) or model.lora.freezes(weight.part)


def saved_weights(model: ModelConfig) -> tuple[Weight, ...]:
    """The weights in a training checkpoint: all, or with adapters only the trained ones.

    The others stay in the base model's checkpoint.
    """
    weights = model_weights(model)
    return tuple(one for one in weights if not is_frozen(one, model)) if model.lora.is_on else weights


def saved_among(weights: Iterable[Weight], model: ModelConfig) -> list[Weight]:
    """The ``weights`` of a stage that a training checkpoint of ``model`` holds; of a tied embedding, both copies."""
    names = {weight.name for weight in saved_weights(model)}
    return [weight for weight in weights if stored_name(weight) in names]


def lacks_adapters(model: ModelConfig) -> bool:
    """Whether adapters are asked for, but no target names a layer that can have one."""
    return model.lora.is_on and not any(weight.is_adapter for weight in model_weights(model))


def _matches_any(patterns: tuple[str, ...], weight: Weight) -> bool:
    return any(matches(pattern, stored_name(weight)) for pattern in patterns)


def nearest_names(pattern: str, weights: Collection[Weight]) -> str:
    """Hint for a pattern that matched nothing: one of Hugging Face's names, a similar word, or how our names start."""
    foreign = [weight.name for weight in weights if any(matches(pattern, name) for name in weight.hf_names)]
    if foreign:
        return f"; in Hugging Face's names it matches {foreign[0]}{' and others' if len(foreign) > 1 else ''}"
    words = {word for weight in weights for word in weight.name.split(".") if not word.isdecimal()}
    starts = dict.fromkeys(".".join(weight.name.split(".")[:2]) for weight in weights)
    return nearest(pattern, sorted(words)) or f"; names start with {', '.join(starts)}"


def freeze_problems(model: ModelConfig) -> Iterator[str]:
    """Patterns without effect, and a model in which nothing is trained.

    The latter is not reported if a wrong pattern in ``--trainable-modules``, or for adapters, explains it.
    ``mm.weights.adapters.adapter_problems`` reports wrong patterns for adapters.
    """
    weights, has_wrong_name = model_weights(model.base), lacks_adapters(model)
    for flag, patterns in {"--freeze-modules": model.freeze_modules,
                           "--trainable-modules": model.trainable_modules}.items():
        for pattern in patterns:
            found = [weight.name for weight in weights if matches(pattern, weight.name)]
            if not found:
                has_wrong_name |= flag == "--trainable-modules"
                yield f"{flag} has {pattern!r}, which matches no weight name{nearest_names(pattern, weights)}"
    if not has_wrong_name and all(is_frozen(weight, model) for weight in model_weights(model)):
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
        """Whether a layer, or another place, has a backward pass in a microbatch with images: its weights, or others
        on the path before it, are trained."""
        return self._begins_before(_position(place, layer) + 1, place)

    def _begins_before(self, position: int, place: Place, has_images: bool = True) -> bool:
        """Whether a weight before ``position`` is trained, on the path of ``place``, or on that of the images where
        they join the tokens."""
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


@dataclass(frozen=True, order=True)
class Group:
    """What Adam does to the weights of one group."""

    max_lr: float
    """The highest learning rate."""
    weight_decay: float


def group_of(weight: Weight, args: Arguments, model: ModelConfig) -> Group:
    """The group of a trained weight.  Both copies of a tied embedding are in the group that the embedding's name gives.

    Biases and norms get no weight decay, as in Megatron and in transformers' Trainer.
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
    return [{**asdict(group), "num_parameters": sum(prod(weight.shape) for weight in weights),
             "weights": [weight.name for weight in weights]}
            for group, weights in optimizer_groups(args, model).items()]


def group_problems(args: Arguments, model: ModelConfig) -> Iterator[str]:
    """Patterns of the command line that change nothing.

    If no adapter is found, that is reported elsewhere.
    """
    weights, lacks_names = model_weights(model), lacks_adapters(model)
    for flag, patterns in (("--lr-scale-modules", args.lr_scale_modules),
                           ("--weight-decay-exclude-modules", args.weight_decay_exclude_modules)):
        for pattern in patterns:
            if not lacks_names and not any(matches(pattern, weight.name) for weight in weights):
                yield f"{flag} has {pattern!r}, which matches no weight name{nearest_names(pattern, weights)}"
