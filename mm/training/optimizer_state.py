"""What megatron's optimizers remember of each parameter, as tensors under the parameter's name.

The only file that looks inside megatron's optimizers for it.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from torch import Tensor

from mm.training.optimizer import owned_ranges, torch_optimizers

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OwnedState:
    """Optimizer state of one parameter, or of the flat range of it that this rank owns."""

    name: str
    start: int
    stop: int
    main: Tensor
    """What the torch optimizer updates: the model's own fp32 memory, or an fp32 copy of it."""
    is_copy: bool
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    """The parameter group that it is in."""

    @property
    def step(self) -> int:
        """Updates made so far; 0 before the first."""
        # torch keeps the count beside the moments, apex and TransformerEngine in the group
        state = self.optimizer.state.get(self.main, {})
        return int(state["step"] if "step" in state else self.group.get("step", 0))

    def tensors(self) -> dict[str, Tensor]:
        """"master" where there is an fp32 copy, and the moments once there are any; all flat and fp32."""
        state = self.optimizer.state.get(self.main, {})
        found = {"master": self.main} if self.is_copy else {}
        found |= {moment: state[moment] for moment in MOMENTS if moment in state}
        return {part: tensor.detach().reshape(-1) for part, tensor in found.items()}

    def restore_moments(self, step: int, moments: dict[str, Tensor]) -> None:
        """Put flat moments in place, in the form in which the optimizer would have made them itself."""
        state: dict[str, Tensor] = {}
        if isinstance(self.optimizer, torch.optim.Adam):
            device = self.main.device if self.group["fused"] or self.group["capturable"] else "cpu"
            state["step"] = torch.full((), float(step), dtype=torch.float32, device=device)
        else:
            self.group["step"] = step
        for moment in MOMENTS:
            state[moment] = torch.empty_like(self.main, requires_grad=False)
            state[moment].copy_(moments[moment].reshape(self.main.shape))
        self.optimizer.state[self.main] = state

    def restore_master(self, values: Tensor) -> None:
        """Set the fp32 copy from flat values."""
        assert self.is_copy, self.name
        self.main.data.copy_(values.reshape(self.main.shape))


def owned_states(optimizer: MegatronOptimizer, model: DistributedDataParallel) -> list[OwnedState]:
    """The state on this rank, in model order; nothing for frozen parameters."""
    places = {
        id(main): (inner, group)
        for inner in torch_optimizers(optimizer)
        for group in inner.param_groups
        for main in group["params"]
    }
    owned = []
    for name, (start, stop) in owned_ranges(optimizer, model).items():
        parameter = model.module.get_parameter(name)
        main = _main_parameter(optimizer, parameter)
        is_copy = parameter.dtype != torch.float32
        owned.append(OwnedState(name, start, stop, main, is_copy, *places[id(main)]))
    return owned


def is_split(optimizer: MegatronOptimizer) -> bool:
    """Whether data-parallel ranks own different parts; otherwise all of them hold the same."""
    return any(isinstance(chained, DistributedOptimizer) for chained in _chained(optimizer))


def scaler_state(optimizer: MegatronOptimizer) -> dict[str, float] | None:
    """The dynamic loss scale and its counters as JSON values; None without loss scaling."""
    for scaler in _scalers(optimizer):
        return {key: float(value) for key, value in scaler.state_dict().items()}
    return None


def restore_scaler(optimizer: MegatronOptimizer, state: dict[str, float]) -> None:
    """Set what ``scaler_state`` gave."""
    for scaler in _scalers(optimizer):
        counters = {key: int(value) for key, value in state.items() if key != "scale"}
        scaler.load_state_dict({**counters, "scale": torch.tensor([state["scale"]], dtype=torch.float32)})


def _chained(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers in megatron's, which has no types for them."""
    return cast(Any, optimizer).chained_optimizers


def _scalers(optimizer: MegatronOptimizer) -> list[Any]:
    """megatron's loss scalers that have a state (a constant one has none)."""
    scalers = [getattr(chained, "grad_scaler", None) for chained in _chained(optimizer)]
    return [scaler for scaler in scalers if scaler is not None and scaler.state_dict()]


def _main_parameter(optimizer: MegatronOptimizer, parameter: torch.nn.Parameter) -> Tensor:
    for chained in _chained(optimizer):
        if isinstance(chained, DistributedOptimizer) and parameter in chained.model_param_group_index_map:
            group, index = chained.model_param_group_index_map[parameter]
            return chained.optimizer.param_groups[group]["params"][index]
    return parameter if parameter.dtype == torch.float32 else cast(Any, parameter).main_param
