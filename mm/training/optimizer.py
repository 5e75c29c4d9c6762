"""The learning-rate schedule, and megatron's Adam over one stage with torch's fused kernel."""

import math
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from mm.errors import AgreedError


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


@dataclass(frozen=True)
class Update:
    """What one update of the weights did."""

    lr: float
    grad_norm: float
    loss_scale: float
    updated: bool
    """False when a gradient overflowed under loss scaling, so that the optimizer skipped the step."""


def build_optimizer(config: OptimizerConfig, model: DistributedDataParallel) -> ChainedOptimizer:
    """Adam over the trainable parameters of ``model``; without any, megatron's stub that only joins reductions.

    Biases and norms get no weight decay, as in Megatron and in transformers' Trainer.
    """
    optimizer = get_megatron_optimizer(
        config,
        [model],
        config_overrides=get_standard_config_overrides(config),
        use_gloo_process_groups=False,
        pg_collection=None,
    )
    assert isinstance(optimizer, ChainedOptimizer)
    for group in optimizer.param_groups:
        group["fused"] = True
        group["weight_decay"] *= group["wd_mult"]  # megatron leaves this to its own scheduler
    return optimizer


def update(optimizer: ChainedOptimizer, lr: float) -> Update:
    """Clip and update with learning rate ``lr``.

    A gradient that overflowed under loss scaling makes the optimizer skip the step.  Any other gradient that is not
    finite raises AgreedError on all ranks, before a weight has changed: the norm is the same number everywhere.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
    loss_scale = float(optimizer.get_loss_scale())
    if optimizer.prepare_grads():
        return Update(lr, 0.0, loss_scale, updated=False)
    grad_norm = float(optimizer.get_grad_norm())
    if not math.isfinite(grad_norm):
        raise AgreedError(f"the gradient norm is {grad_norm}: a gradient is not finite, so no weight was changed")
    inner: list[Any] = optimizer.chained_optimizers  # their base class in megatron lacks what all of them have
    for chained in inner:
        max_norm = chained.config.clip_grad
        if max_norm > 0.0 and not chained.is_stub_optimizer and chained.get_parameters():
            clip_grad_by_total_norm_fp32(chained.get_parameters(), max_norm=max_norm, total_norm=grad_norm)
    return Update(lr, grad_norm, loss_scale, optimizer.step_with_ready_grads())
