"""What every layer is built with, and functions that build its parts."""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from mm.device.device import Device
from mm.model.layers.linear import ColumnLinear, RowLinear
from mm.model.layers.norm import RMSNorm
from mm.model.recompute import HostActivations
from mm.parallel.zero.weight_shards import without_memory

Built = TypeVar("Built", bound=nn.Module)


@dataclass(frozen=True)
class LayerContext:
    """What every layer is built with: megatron's parallel settings, the tensor-parallel group and the device."""

    parallel: TransformerConfig
    tp_group: dist.ProcessGroup
    device: Device
    keeps_weights: bool = True
    """Whether modules keep the memory of their weights; else ``WeightShards`` does."""
    host: HostActivations | None = None
    """Where layers keep their activations for the backward pass if ``OffloadConfig`` says so."""

    def built(self, module: Built) -> Built:
        """``module``, whose weights may have lost their memory: the next module can have it."""
        if not self.keeps_weights:
            without_memory(module)
        return module

    @property
    def tp_size(self) -> int:
        return self.tp_group.size()

    @property
    def alone(self) -> "LayerContext":
        """The context of layers that are whole on this rank: its tensor-parallel group has one rank, which never
        communicates."""
        settings = replace(self.parallel, tensor_model_parallel_size=1, sequence_parallel=False)
        one_rank = dist.ProcessGroup(0, 1)  # pyright: ignore[reportCallIssue]  (rank and size; torch's types lack it)
        return replace(self, parallel=settings, tp_group=one_rank)

    def column(self, input_size: int, output_size: int, bias: bool) -> ColumnLinear:
        """A linear layer whose outputs are sharded over tensor parallelism."""
        return ColumnLinear(
            input_size, output_size, self.device.kernels.accumulate, config=self.parallel, init_method=never_initialize,
            bias=bias, gather_output=False, tp_group=self.tp_group)

    def row(self, input_size: int, output_size: int, bias: bool) -> RowLinear:
        """A linear layer whose inputs are sharded over tensor parallelism; its output is whole on every rank."""
        return RowLinear(
            input_size, output_size, self.device.kernels.accumulate, config=self.parallel, init_method=never_initialize,
            bias=bias, input_is_parallel=True, skip_bias_add=False, tp_group=self.tp_group)

    def norm(self, hidden_size: int, epsilon: float) -> RMSNorm:
        return RMSNorm(self.empty(hidden_size), epsilon, self.device.kernels)

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter of the shape that this rank holds; its values come from ``mm.model.load``."""
        return nn.Parameter(torch.empty(shape, dtype=self.parallel.params_dtype, device=self.device.torch_device))


def never_initialize(_: Tensor) -> None:
    raise AssertionError("weights are loaded or drawn by mm.model.load, never initialised by a layer")
