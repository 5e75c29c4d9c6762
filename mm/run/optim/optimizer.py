"""Megatron's Adam over one stage, with torch's fused kernel; and its state for each parameter, as tensors by name."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
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

from mm.config.args import Arguments
from mm.device.device import Device
from mm.parallel.megatron import DTYPES
from mm.parallel.zero.gradient_buffers import freed_gradients
from mm.parallel.zero.gradient_shards import ShardedGradients
from mm.run.optim.block_adam import MASTER, MOMENTS, BlockAdam, KeptStates, fills_weights
from mm.weights.shard import REMAINDER, split
from mm.weights.trained import Group


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
            config, list(models), config_overrides=overrides, use_gloo_process_groups=False, pg_collection=None)
        assert isinstance(optimizer, ChainedOptimizer)
        for group in optimizer.param_groups:
            group["fused"] = True
        _keep_weights_in(optimizer, models)
        if not kept.is_usual:
            _keep_states(optimizer, kept, device)
    _take_gradients_from(optimizer, models)
    return optimizer


def _keep_states(optimizer: ChainedOptimizer, kept: KeptStates, device: Device) -> None:
    """Let the optimizer keep its states as ``kept`` says.  megatron's own options do not: its 16-bit states need
    TransformerEngine's kernel, and states in host memory are updated there, by another kernel."""
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
              for bucket in model.gradient_buckets for weight, shard in bucket.shards()}  # fmt: skip

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


@dataclass(frozen=True)
class OwnedState:
    """Optimizer state of one parameter, or of this rank's flat range of it."""

    name: str
    start: int
    stop: int
    main: Tensor
    """The tensor that the torch optimizer updates: the fp32 parameter itself, or its fp32 copy.  Without memory if no
    fp32 copy is kept on the device (``BlockAdam``)."""
    group: dict[str, Any]
    """Its parameter group."""
    is_copy: bool
    optimizer: torch.optim.Optimizer

    @property
    def step(self) -> int:
        """Updates made so far; 0 before the first."""
        # torch stores the count with the moments, apex and TransformerEngine in the group
        state = self.optimizer.state.get(self.main, {})
        return int(state["step"] if "step" in state else self.group.get("step", 0))

    @property
    def _weight(self) -> Tensor | None:
        """The flat bf16 weight if no fp32 copy of it is kept; else None."""
        if not isinstance(self.optimizer, BlockAdam) or self.optimizer.kept.copy == "fp32":
            return None
        weight = self.optimizer.weights.get(self.main)
        return None if weight is None else weight.view(-1)

    @property
    def has_fp32(self) -> bool:
        """Whether the fp32 number of each element is kept, in whatever form."""
        return self._weight is None or REMAINDER in self.optimizer.state[self.main]

    def tensors(self) -> dict[str, Tensor]:
        """What is kept beside the weight, flat and in its own dtypes: "master", an fp32 copy, or "remainder", what the
        weight lacks of it; and the moments once they exist.  Those in host memory are up to date only after a wait for
        ``wait_for_states``."""
        state = self.optimizer.state.get(self.main, {})
        found = {MASTER: state.get(MASTER, self.main)} if self.is_copy and self._weight is None else {}
        found |= {kind: state[kind] for kind in (REMAINDER, *MOMENTS) if kind in state}
        return {kind: tensor.detach().reshape(-1) for kind, tensor in found.items()}

    def restored(self) -> list[Tensor]:
        """The tensors that ``restore_master`` and ``restore_moments`` fill, for a broadcast.  int16 is viewed as bytes,
        because NCCL does not support it."""
        weight, kept = self._weight, list(self.tensors().values())
        some = [*kept, weight] if weight is not None else kept
        return [one.view(torch.uint8) if one.dtype == torch.int16 else one for one in some]

    def restore_master(self, numbers: Tensor) -> None:
        """Install flat fp32 numbers as the copy, or as the weight and its remainder."""
        assert self.has_fp32, "nothing but a bf16 weight is kept"
        if (weight := self._weight) is None:
            master = self.optimizer.state.get(self.main, {}).get(MASTER, self.main.data)
            master.copy_(numbers.reshape(self.main.shape))
        else:
            remainder = torch.empty(weight.shape, dtype=torch.int16, device=weight.device)
            split(numbers.to(weight.device, torch.float32), weight, remainder)
            self.optimizer.state[self.main][REMAINDER].view(-1).copy_(remainder)

    def restore_moments(self, step: int, moments: dict[str, Tensor] | None) -> None:
        """Install flat moments in the form and the dtypes that the optimizer itself would create.  None allocates
        memory for them, which the caller fills."""
        before = self.optimizer.state.get(self.main, {})
        state: dict[str, Tensor] = {kind: before[kind] for kind in (MASTER, REMAINDER) if kind in before}
        if isinstance(self.optimizer, torch.optim.Adam):
            device = self.main.device if self.group["fused"] or self.group["capturable"] else "cpu"
            state["step"] = torch.full((), float(step), dtype=torch.float32, device=device)
        else:
            self.group["step"] = step
        for moment in MOMENTS:
            state[moment] = (self.optimizer.new_state(self.main, moment) if isinstance(self.optimizer, BlockAdam) else
                             torch.empty_like(self.main, requires_grad=False))
            if moments is not None:
                state[moment].copy_(moments[moment].reshape(self.main.shape))
        self.optimizer.state[self.main] = state


def owned_states(optimizer: ChainedOptimizer, models: Sequence[DistributedDataParallel]) -> list[OwnedState]:
    """The state of trainable parameters on this rank, in model order.

    Without the distributed optimizer, states cover whole parameters.  With it, they cover this data-parallel rank's
    range of each, and parameters of which it owns nothing are omitted.
    """
    return [state for model in models for name, parameter in model.module.named_parameters() if parameter.requires_grad
            for chained in optimizer.chained_optimizers for state in _owned(name, parameter, chained)]


def _owned(name: str, parameter: Any, chained: Any) -> Iterator[OwnedState]:
    """The part of ``parameter`` that ``chained`` updates, if any."""
    optimizer, is_copy = chained.optimizer, parameter.dtype != torch.float32
    if isinstance(chained, DistributedOptimizer):
        if parameter in chained.model_param_group_index_map:
            group_index, index = chained.model_param_group_index_map[parameter]
            group = optimizer.param_groups[group_index]
            owned = chained._get_model_param_range_map(parameter)["param"]
            yield OwnedState(name, owned.start, owned.end, group["params"][index], group, is_copy, optimizer)
        return
    main = parameter.main_param if is_copy else parameter
    for group in optimizer.param_groups:
        if any(one is main for one in group["params"]):
            yield OwnedState(name, 0, parameter.numel(), main, group, is_copy, optimizer)


def take_weights(optimizer: ChainedOptimizer) -> None:
    """Reset what is kept beside the weights to the weights just loaded: copies equal them, remainders are 0."""
    chained: Any
    for chained in optimizer.chained_optimizers:
        if not chained.is_stub_optimizer and fills_weights(chained.optimizer):
            chained.optimizer.take_weights()
        else:
            chained.reload_model_params()


def wait_for_states(optimizer: ChainedOptimizer) -> None:
    """Wait until the states of all updates so far have arrived in host memory, if they are kept there."""
    for chained in optimizer.chained_optimizers:
        if isinstance(inner := getattr(chained, "optimizer", None), BlockAdam):
            inner.wait()


def is_split(optimizer: ChainedOptimizer) -> bool:
    """Whether data-parallel ranks own different parts; otherwise all hold the same state."""
    return any(isinstance(chained, DistributedOptimizer) for chained in optimizer.chained_optimizers)


def scaler_state(optimizer: ChainedOptimizer) -> dict[str, float] | None:
    """The dynamic loss scale and its counters as JSON values; None without loss scaling."""
    states = (scaler.state_dict().items() for scaler in _scalers(optimizer))
    return next(({key: float(value) for key, value in state} for state in states), None)


def restore_scaler(optimizer: ChainedOptimizer, state: dict[str, float]) -> None:
    """Restore the result of ``scaler_state``."""
    for scaler in _scalers(optimizer):
        counters = {key: int(value) for key, value in state.items() if key != "scale"}
        scaler.load_state_dict({**counters, "scale": torch.tensor([state["scale"]], dtype=torch.float32)})


def _scalers(optimizer: ChainedOptimizer) -> list[Any]:
    """megatron's loss scalers with state (a constant one has none)."""
    scalers = [getattr(chained, "grad_scaler", None) for chained in optimizer.chained_optimizers]
    return [scaler for scaler in scalers if scaler is not None and scaler.state_dict()]
