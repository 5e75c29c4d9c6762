"""Which trained weight gets which learning rate and weight decay: the groups of the optimizer.

The model JSON may give a part a learning rate, which is the maximum for that part.  Its schedule is that of ``--lr``,
scaled, with warm-up and minimum.  Megatron's ``lr_mult`` does the same, and so does Qwen's trainer, whose scheduler
multiplies every group by one factor.  ``--lr-mult`` multiplies the rate of the part.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from mm.config.args import Arguments
from mm.config.model import ModelConfig
from mm.weights.names import matches
from mm.weights.table import Weight, model_weights, stored_name
from mm.weights.trained import is_frozen, lacks_adapters, nearest_names


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
