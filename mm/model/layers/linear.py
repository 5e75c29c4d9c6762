"""megatron-core's tensor-parallel linear layers with our own local arithmetic.

The bias is part of the matrix product, and the product for the weight's gradient adds directly to megatron's gradient
buffer, in any precision, as apex's fused kernel does.  The operation that reads the product sums the gradient of the
bias (``mm.device.pointwise``).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from mm.device.kernels import Accumulate
from mm.model.parallel.sharded_rows import ShardedRows, reduce_rows
from mm.parallel.zero.gradient_buffers import gradient_from, take_buffer


class _Linear(torch.autograd.Function):
    """x W^T + b; the gradient of x is summed over ``group`` while the gradient of W is computed.

    If x is a shard of ``sharded`` rows, all rows are gathered for the product, and again for the gradient of W; only
    the shard is kept.  Backward overlaps each collective with a product: it gathers x during the product for the
    gradient of x, and reduce-scatters that gradient during the product for the gradient of W.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, accumulate: Accumulate,
        group: dist.ProcessGroup | None, sharded: ShardedRows | None,
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight, ctx.has_bias, ctx.accumulate, ctx.group = weight, bias is not None, accumulate, group
        ctx.sharded = sharded
        return F.linear(x if sharded is None else sharded.gather(x), weight.flatten(1), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x_gradient = weight_gradient = bias_gradient = reduction = gathered = None
        if ctx.sharded is not None and ctx.needs_input_grad[1]:
            gathered = ctx.sharded.start_gathering(x)
        if ctx.needs_input_grad[0]:
            x_gradient = gradient @ ctx.weight.flatten(1)
        if gathered is not None:
            x = gathered()
        if x_gradient is not None:
            if ctx.sharded is not None:
                reduction, x_gradient = ctx.sharded.start_reducing(x_gradient)
            elif ctx.group is not None:
                reduction = dist.all_reduce(x_gradient, group=ctx.group, async_op=True)
        if ctx.needs_input_grad[1]:
            buffer, is_stale = take_buffer(ctx.weight)
            ctx.accumulate(buffer.flatten(1), gradient, x, is_stale)
            weight_gradient = gradient_from(buffer, ctx.weight)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            bias_gradient = gradient.sum(0)
        if reduction is not None:
            reduction.wait()
        return x_gradient, weight_gradient, bias_gradient, None, None, None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, accumulate: Accumulate,
    gradient_group: dist.ProcessGroup | None = None, sharded: ShardedRows | None = None,
) -> Tensor:
    """x W^T + b of x [rows, input]; ``weight`` is [output, ...], its other axes flattened.

    The gradient of x is summed over ``gradient_group``, the ranks that hold the other outputs.  With ``sharded``, x is
    a shard of the rows and the result has all rows.
    """
    return _Linear.apply(x, weight, bias, accumulate, gradient_group, sharded)


class _OwnArithmetic(nn.Module):
    """What both layers add to megatron's."""

    weight: Any
    tp_group: dist.ProcessGroup

    def __init__(self, input_size: int, output_size: int, accumulate: Accumulate, **settings: Any) -> None:
        """``settings``: megatron's."""
        super().__init__(input_size, output_size, **settings)
        self.accumulate = accumulate
        self.adapters: tuple[Any, ...] = ()
        """``mm.model.layers.lora_linear.Adapter``, which stands above."""


class ColumnLinear(_OwnArithmetic, ColumnParallelLinear):
    """A linear layer whose outputs are sharded over tensor parallelism."""

    def forward(
        self, x: Tensor, sharded: ShardedRows | None = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[rows, input], or a shard of ``sharded`` -> [rows, output / TP], and the bias that is already added to them.

        The caller sums the gradient of the bias.  ``keys``: of rows, for adapters' dropout.
        """
        group = self.tp_group if self.tp_group.size() > 1 else None
        y = linear(x, self.weight, None if self.bias is None else self.bias.detach(), self.accumulate, group, sharded)
        for adapter in self.adapters:
            y = adapter.add_to_outputs(y, x, sharded, keys)
        return y, self.bias


class RowLinear(_OwnArithmetic, RowParallelLinear):
    """A linear layer whose inputs are sharded over tensor parallelism."""

    def forward(
        self, x: Tensor, sharded: ShardedRows | None = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[rows, input / TP] -> [rows, output], or a shard of them, and a bias that the caller must add (or None).

        The caller sums the gradient of the bias (``RMSNorm``, ``biased``).  ``keys``: of rows, for adapters' dropout.
        """
        bias = None if self.bias is None else self.bias.detach()
        if self.tp_group.size() == 1:  # no sum over ranks: the bias is part of the product
            y, bias = linear(x, self.weight, bias, self.accumulate), None
        else:
            y = sum_over_ranks(linear(x, self.weight, None, self.accumulate), self.tp_group, sharded)
        if self.adapters and bias is not None:
            y, bias = y + bias, None
        for adapter in self.adapters:
            y = adapter.add_to_sum(y, x, sharded, keys)
        return y, bias


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup, sharded: ShardedRows | None) -> Tensor:
    """The sum over tensor-parallel ranks: whole on each, or its shard of the rows."""
    return reduce_from_tensor_model_parallel_region(x, group) if sharded is None else reduce_rows(x, sharded)
