"""Megatron's Adam over one stage, with torch's fused kernel."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    DistributedOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
)
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from torch import Tensor, nn

from mm.config.flags import Arguments
from mm.device.device import Device
from mm.parallel.gradients import freed_gradients
from mm.parallel.megatron import DTYPES
from mm.parallel.sharded import ShardedGradients
from mm.training.block_adam import BlockAdam, KeptStates
from mm.weights.groups import Group


def kept_states(args: Arguments) -> KeptStates:
    """How the run keeps the states of weights between steps."""
    return KeptStates({"exp_avg": DTYPES[args.exp_avg_dtype], "exp_avg_sq": DTYPES[args.exp_avg_sq_dtype]},
                      args.kept_copy, args.host_share)


def build_optimizer(
    config: OptimizerConfig, models: Sequence[DistributedDataParallel], groups: Mapping[str, Group],
    kept: KeptStates, device: Device,
) -> ChainedOptimizer:  # fmt: skip
    """Adam over the trainable parameters of ``models``; without any, megatron's stub, which only joins reductions.

    ``groups`` maps every trainable parameter of this rank to its group.  megatron creates the same groups on all ranks,
    some of them empty; the ``lr_mult`` of a group multiplies the learning rate of the step.  Raises UserError if
    states in host memory do not fit there.
    """
    trained = [name for model in models for name, parameter in model.module.named_parameters()
               if parameter.requires_grad]
    assert sorted(trained) == sorted(groups), sorted(set(trained) ^ set(groups))
    overrides = {_key(group, groups): _override(group, config) for group in set(groups.values())}
    # until BlockAdam moves them to host memory, the copies need room on the device
    with freed_gradients(models) if kept.host_share else nullcontext():
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
        _keep_weights_in(optimizer, models)
        if not kept.is_usual:
            _keep_states(optimizer, kept, device)
    _take_gradients_from(optimizer, models)
    return optimizer


def _keep_states(optimizer: ChainedOptimizer, kept: KeptStates, device: Device) -> None:
    """Let the optimizer keep its states as ``kept`` says.

    megatron's own options do not: its 16-bit states need TransformerEngine's kernel, and states in host memory are
    updated there, by another kernel.
    """
    chained: Any
    for chained in optimizer.chained_optimizers:
        if not chained.is_stub_optimizer:
            weights = dict(_copies(chained)) if kept.copy != "fp32" or kept.host_share else {}
            chained.optimizer = BlockAdam(chained.optimizer, kept, weights, device)


def _copies(chained: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The fp32 copies that ``chained`` updates, each with the weight, or the range of it, that it is a copy of."""
    if isinstance(chained, DistributedOptimizer):
        copies, weights = chained.shard_fp32_from_float16_groups, chained.shard_float16_groups
    elif isinstance(chained, Float16OptimizerWithFloat16Params):
        copies, weights = chained.fp32_from_float16_groups, chained.float16_groups
    else:
        return  # it updates fp32 weights
    yield from zip(chain.from_iterable(copies), map(Tensor.detach, chain.from_iterable(weights)), strict=True)


def _take_gradients_from(optimizer: ChainedOptimizer, models: Sequence[DistributedDataParallel]) -> None:
    """Let the optimizer read the gradients of its parts of the weights from their shards, if ``models`` keep shards;
    megatron reads them from its buffers."""
    shards = {weight: shard for model in models if isinstance(model, ShardedGradients)
              for unit in model.units for weight, shard in unit.shards()}  # fmt: skip

    def take(chained: Any) -> None:
        pairs = zip(chain(*chained.model_float16_groups, *chained.model_fp32_groups),
                    chain(*chained.shard_fp32_from_float16_groups, *chained.shard_fp32_groups), strict=True)
        for weight, updated in pairs:
            updated.grad = shards[weight]

    chained: Any
    for chained in optimizer.chained_optimizers if shards else ():
        if not chained.is_stub_optimizer:
            chained._copy_model_grads_to_main_grads = partial(take, chained)


def _keep_weights_in(optimizer: ChainedOptimizer, models: Sequence[DistributedDataParallel]) -> None:
    """Let the optimizer update its parts of the weights in their shards, if ``models`` keep shards; megatron would
    update ranges of the whole weights, which then have no memory."""
    shards = {weight: shards.shard_of(weight)[0] for model in models if isinstance(model, ShardedGradients)
              for shards in [model.weight_shards] if shards for weight in model.params_with_grad}  # fmt: skip

    def copy_to_main(chained: Any, state_dict: None = None) -> None:
        for weight, copy in zip(chain(*chained.model_float16_groups), chain(*chained.shard_fp32_from_float16_groups),
                                strict=True):
            copy.data.copy_(shards[weight])

    chained: Any
    for chained in optimizer.chained_optimizers if shards else ():
        if not chained.is_stub_optimizer:
            weights = chain(*chained.model_float16_groups, *chained.model_fp32_groups)
            updated = chain(*chained.shard_float16_groups, *chained.shard_fp32_groups)
            for weight, own in zip(weights, updated, strict=True):
                own.data = shards[weight]
            copy_to_main(chained)
            chained._copy_model_params_to_main_params = partial(copy_to_main, chained)


def _override(group: Group, config: OptimizerConfig) -> Any:
    """Values that megatron puts into the parameter group; torch's Adam reads the weight decay there."""
    assert config.lr is not None
    return {"lr_mult": group.max_lr / config.lr if config.lr > 0.0 else 1.0, "weight_decay": group.weight_decay}


def _key(group: Group, groups: Mapping[str, Group]) -> ParamKey:
    """A key that selects the parameters of ``group``; megatron treats keys with the same name as equal."""

    def is_inside(_: nn.Parameter, name: str) -> bool:
        return groups[name.removeprefix("module.")] == group  # DDP adds the prefix

    return ParamKey(with_name_predicate=ParamWithNamePredicate(str(group), is_inside))
