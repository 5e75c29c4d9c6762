"""Megatron's Adam over one stage, with torch's fused kernel."""

from collections.abc import Iterator, Mapping, Sequence
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
    shards = {weight: shard for model in models if isinstance(model, ShardedGradients)
              for unit in model.units for weight, shard in unit.shards()}  # fmt: skip
    if shards:
        for one in optimizer.chained_optimizers:
            _take_gradients_from(one, shards)
    weight_shards = {weight: shards.shard_of(weight)[0] for model in models if isinstance(model, ShardedGradients)
                     for shards in [model.weight_shards] if shards for weight in model.params_with_grad}  # fmt: skip
    if weight_shards:
        for one in optimizer.chained_optimizers:
            _keep_weights_in(one, weight_shards)
    if not kept.is_usual:
        chained: Any
        for chained in optimizer.chained_optimizers:
            if not chained.is_stub_optimizer:
                # megatron's own states of 16 bits are in TransformerEngine's kernel, those in host memory are updated
                # there, by another kernel
                weights = dict(_copies(chained)) if kept.copy != "fp32" or kept.host_share else {}
                chained.optimizer = BlockAdam(chained.optimizer, kept, weights, device)
    return optimizer


def _copies(chained: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The fp32 copies that ``chained`` updates, each with the weight, or the range of it, that it is a copy of."""
    if isinstance(chained, DistributedOptimizer):
        copies, weights = chained.shard_fp32_from_float16_groups, chained.shard_float16_groups
    elif isinstance(chained, Float16OptimizerWithFloat16Params):
        copies, weights = chained.fp32_from_float16_groups, chained.float16_groups
    else:
        return  # it updates fp32 weights
    yield from zip(chain.from_iterable(copies), map(Tensor.detach, chain.from_iterable(weights)), strict=True)


def _take_gradients_from(chained: Any, shards: Mapping[Any, Tensor]) -> None:
    """Let ``chained`` read the gradients of its parts of the weights from ``shards``; megatron has them in buffers."""

    def take() -> None:
        pairs = zip(chain(*chained.model_float16_groups, *chained.model_fp32_groups),
                    chain(*chained.shard_fp32_from_float16_groups, *chained.shard_fp32_groups), strict=True)
        for weight, updated in pairs:
            updated.grad = shards[weight]

    if not chained.is_stub_optimizer:
        chained._copy_model_grads_to_main_grads = take


def _keep_weights_in(chained: Any, shards: Mapping[Any, Tensor]) -> None:
    """Let ``chained`` update the parts of weights in ``shards``; megatron has them in whole weights, which have no
    memory here."""

    def copy_to_main(state_dict: None = None) -> None:
        for weight, copy in zip(chain(*chained.model_float16_groups), chain(*chained.shard_fp32_from_float16_groups),
                                strict=True):
            copy.data.copy_(shards[weight])

    if not chained.is_stub_optimizer:
        weights = chain(*chained.model_float16_groups, *chained.model_fp32_groups)
        updated = chain(*chained.shard_float16_groups, *chained.shard_fp32_groups)
        for weight, own in zip(weights, updated, strict=True):
            own.data = shards[weight]
        copy_to_main()
        chained._copy_model_params_to_main_params = copy_to_main


def _override(group: Group, config: OptimizerConfig) -> Any:
    """Values that megatron puts into the parameter group; torch's Adam reads the weight decay there."""
    assert config.lr is not None
    return {"lr_mult": group.max_lr / config.lr if config.lr > 0.0 else 1.0, "weight_decay": group.weight_decay}


def _key(group: Group, groups: Mapping[str, Group]) -> ParamKey:
    """A key that selects the parameters of ``group``; megatron treats keys with the same name as equal."""

    def is_inside(_: nn.Parameter, name: str) -> bool:
        return groups[name.removeprefix("module.")] == group  # DDP adds the prefix

    return ParamKey(with_name_predicate=ParamWithNamePredicate(str(group), is_inside))
