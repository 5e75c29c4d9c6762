"""The learning-rate schedule, and megatron's Adam over one stage with torch's fused kernel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)


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


def build_optimizer(config: OptimizerConfig, models: Sequence[DistributedDataParallel]) -> ChainedOptimizer:
    """Adam over the trainable parameters of ``models``; without any, megatron's stub that only joins reductions.

    Biases and norms get no weight decay, as in Megatron and in transformers' Trainer.
    """
    optimizer = get_megatron_optimizer(
        config,
        list(models),
        config_overrides=get_standard_config_overrides(config),
        use_gloo_process_groups=False,
        pg_collection=None,
    )
    assert isinstance(optimizer, ChainedOptimizer)
    for group in optimizer.param_groups:
        group["fused"] = True
        group["weight_decay"] *= group["wd_mult"]  # megatron leaves this to its own scheduler
    return optimizer
