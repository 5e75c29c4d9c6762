"""The state of megatron's optimizers for each parameter, as tensors by the parameter's name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer
from torch import Tensor

from mm.training.block_adam import MASTER, MOMENTS, BlockAdam, fills_weights
from mm.weights.halves import REMAINDER, split


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
        """The tensors that ``restore_master`` and ``restore_moments`` fill, for a broadcast.

        int16 is viewed as bytes, because NCCL does not support it.
        """
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
        """Install flat moments in the form and the dtypes that the optimizer itself would create.

        None allocates memory for them, which the caller fills.
        """
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
