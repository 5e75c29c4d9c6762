"""Megatron's Adam over one stage, with torch's fused kernel."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from torch import nn

from mm.device.pointwise import Leaf
from mm.training.rounded_adam import RoundedAdam
from mm.weights.groups import Group


def build_optimizer(
    config: OptimizerConfig, models: Sequence[DistributedDataParallel], groups: Mapping[str, Group],
    moment_dtypes: Mapping[str, torch.dtype], rounded_at_random: Leaf,
) -> ChainedOptimizer:  # fmt: skip
    """Adam over the trainable parameters of ``models``; without any, megatron's stub, which only joins reductions.

    ``groups`` maps every trainable parameter of this rank to its group.  megatron creates the same groups on all ranks,
    some of them empty; the ``lr_mult`` of a group multiplies the learning rate of the step.  ``moment_dtypes``: dtypes
    of the moments between steps; ``rounded_at_random``: the device's form of ``mm.device.hashing.rounded_at_random``.
    """
    trained = [name for model in models for name, parameter in model.module.named_parameters()
               if parameter.requires_grad]
    assert sorted(trained) == sorted(groups), sorted(set(trained) ^ set(groups))
    overrides = {_key(group, groups): _override(group, config) for group in set(groups.values())}
    optimizer = get_megatron_optimizer(
        config,
        list(models),
        config_overrides=overrides,
        use_gloo_process_groups=False,
        pg_collection=None,
    )
    assert isinstance(optimizer, ChainedOptimizer)
    for group in optimizer.param_groups:
        group["fused"] = True
    if set(moment_dtypes.values()) != {torch.float32}:
        chained: Any
        for chained in optimizer.chained_optimizers:
            if not chained.is_stub_optimizer:
                # megatron's own moments of 16 bits are in TransformerEngine's kernel
                chained.optimizer = RoundedAdam(chained.optimizer, moment_dtypes, rounded_at_random)
    return optimizer


def _override(group: Group, config: OptimizerConfig) -> Any:
    """Values that megatron puts into the parameter group; torch's Adam reads the weight decay there."""
    assert config.lr is not None
    return {"lr_mult": group.max_lr / config.lr if config.lr > 0.0 else 1.0, "weight_decay": group.weight_decay}


def _key(group: Group, groups: Mapping[str, Group]) -> ParamKey:
    """A key that selects the parameters of ``group``; megatron treats keys with the same name as equal."""

    def is_inside(_: nn.Parameter, name: str) -> bool:
        return groups[name.removeprefix("module.")] == group  # DDP adds the prefix

    return ParamKey(with_name_predicate=ParamWithNamePredicate(str(group), is_inside))
