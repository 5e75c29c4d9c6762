"""Which trained weight gets which learning rate and weight decay: the groups of the optimizer.

A learning rate of a part is its own maximum.  It has the schedule of ``--lr`` in proportion, warm-up and minimum
included: Megatron's ``lr_mult`` and Qwen's trainer, whose scheduler multiplies every group by one factor, do the same.
``--lr-mult`` multiplies what the part gives.
"""

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from mm.config.flags import Arguments
from mm.config.model import ModelConfig
from mm.errors import nearest
from mm.weights.table import Weight, model_weights, stored_name


@dataclass(frozen=True, order=True)
class Group:
    """What Adam does to the weights of one group."""

    max_lr: float
    """The highest learning rate."""
    weight_decay: float


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` stands anywhere in ``name``: MindSpeed-MM's rule for its keywords, without regard to case.

    Beyond it, ``*``, ``?`` and ``[0-9]`` mean what they mean in a shell.
    """
    return fnmatchcase(name.lower(), f"*{pattern.lower()}*")


def group_of(weight: Weight, args: Arguments, model: ModelConfig) -> Group:
    """The group of a trained weight; both copies of a tied embedding are in the group of its own name.

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
        if not model.is_frozen(weight.part):
            groups.setdefault(group_of(weight, args, model), []).append(weight)
    return groups


def group_facts(args: Arguments, model: ModelConfig) -> list[dict[str, Any]]:
    """The groups as JSON values, for the file of a run: rates, size and names."""
    return [{**asdict(group), "num_parameters": sum(prod(weight.shape) for weight in weights),
             "weights": [weight.name for weight in weights]}
            for group, weights in optimizer_groups(args, model).items()]


def group_problems(args: Arguments, model: ModelConfig) -> Iterator[str]:
    """Patterns of the command line that change nothing."""
    weights = model_weights(model)
    trained = {weight.name for weight in weights if not model.is_frozen(weight.part)}
    for flag, patterns in (("--lr-scale-modules", args.lr_scale_modules),
                           ("--weight-decay-exclude-modules", args.weight_decay_exclude_modules)):
        for pattern in patterns:
            found = [weight.name for weight in weights if matches(pattern, weight.name)]
            if not found:
                yield f"{flag} has {pattern!r}, which is in no name of a weight{_hint(pattern, weights)}"
            elif trained.isdisjoint(found):
                yield (f"{flag} has {pattern!r}, which is in names of frozen weights only, such as {found[0]}; leave "
                       f"it out, or set freeze to false in that part of the model JSON")


def _hint(pattern: str, weights: Collection[Weight]) -> str:
    """The nearest words of our names, those that Hugging Face's name stands for, or how ours begin."""
    foreign = [weight.name for weight in weights if any(matches(pattern, name) for name in weight.hf_names)]
    if foreign:
        return f"; in Hugging Face's names it stands for {foreign[0]}{' and others' if len(foreign) > 1 else ''}"
    words = {word for weight in weights for word in weight.name.split(".") if not word.isdecimal()}
    starts = dict.fromkeys(".".join(weight.name.split(".")[:2]) for weight in weights)
    return nearest(pattern, sorted(words)) or f"; names begin with {', '.join(starts)}"
