"""The learning-rate schedule, and megatron's Adam over one stage with torch's fused kernel."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from torch import nn

from mm.weights.groups import Group


@dataclass(frozen=True)
class LearningRate:
    """The schedule as a pure function of how many samples were consumed before the step (Megatron's rule)."""

    max_lr: float
    min_lr: float
    warmup_init: float
    warmup_samples: float
    decay_samples: float
    decay_style: str
    """"constant", "linear", "cosine" or "inverse-square-root"."""

    def at(self, consumed_samples: int) -> float:
        """The rate of the step that begins after ``consumed_samples``."""
        if self.warmup_samples > 0 and consumed_samples <= self.warmup_samples:
            return self.warmup_init + (self.max_lr - self.warmup_init) * consumed_samples / self.warmup_samples
        if self.decay_style == "constant":
            return self.max_lr
        if consumed_samples > self.decay_samples:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            warmup, now = max(self.warmup_samples, 1), max(consumed_samples, 1)
            return max(self.min_lr, self.max_lr * math.sqrt(warmup / now))
        ratio = (consumed_samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        coefficient = 1.0 - ratio if self.decay_style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
        return self.min_lr + coefficient * (self.max_lr - self.min_lr)


def build_optimizer(
    config: OptimizerConfig, models: Sequence[DistributedDataParallel], groups: Mapping[str, Group]
) -> ChainedOptimizer:
    """Adam over the trainable parameters of ``models``; without any, megatron's stub that only joins reductions.

    ``groups`` has the group of every trainable parameter of this rank.  megatron gives all ranks the same groups, of
    which some are empty on some; ``lr_mult`` of each is for the learning rate of the step.
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
    return optimizer


def _override(group: Group, config: OptimizerConfig) -> Any:
    """What megatron puts into the parameter group, where torch's Adam finds the weight decay."""
    assert config.lr is not None
    return {"lr_mult": group.max_lr / config.lr if config.lr > 0.0 else 1.0, "weight_decay": group.weight_decay}


def _key(group: Group, groups: Mapping[str, Group]) -> ParamKey:
    """The parameters of ``group``; megatron takes keys of the same name for one."""

    def is_inside(_: nn.Parameter, name: str) -> bool:
        return groups[name.removeprefix("module.")] == group  # the DDP's name

    return ParamKey(with_name_predicate=ParamWithNamePredicate(str(group), is_inside))
