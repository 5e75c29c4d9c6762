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
from torch import Tensor

from mm.device.kernels import Accumulate
from mm.model.parallel.sharded_rows import CutRows, reduce_rows
from mm.parallel.zero.gradient_buffers import gradient_from, take_buffer


class _Linear(torch.autograd.Function):
    """x W^T + b; the gradient of x is summed over ``group`` while the gradient of W is computed.

    If x is a piece of ``cut`` rows, all rows are gathered for the product, and again for the gradient of W; only the
    piece is kept.  Backward overlaps each collective with a product: it gathers x during the product for the gradient
    of x, and reduce-scatters that gradient during the product for the gradient of W.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, accumulate: Accumulate,
        group: dist.ProcessGroup | None, cut: CutRows | None,
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight, ctx.has_bias, ctx.accumulate, ctx.group, ctx.cut = weight, bias is not None, accumulate, group, cut
        return F.linear(x if cut is None else cut.gather(x), weight.flatten(1), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x_gradient = weight_gradient = bias_gradient = reduction = gathered = None
        if ctx.cut is not None and ctx.needs_input_grad[1]:
            gathered = ctx.cut.start_gathering(x)
        if ctx.needs_input_grad[0]:
            x_gradient = gradient @ ctx.weight.flatten(1)
        if gathered is not None:
            x = gathered()
        if x_gradient is not None:
            if ctx.cut is not None:
                reduction, x_gradient = ctx.cut.start_reducing(x_gradient)
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
    gradient_group: dist.ProcessGroup | None = None, cut: CutRows | None = None,
) -> Tensor:
    """x W^T + b of x [rows, input]; ``weight`` is [output, ...], its other axes flattened.

    The gradient of x is summed over ``gradient_group``, the ranks that hold the other outputs.  With ``cut``, x is a
    piece of the rows and the result has all rows.
    """
    return _Linear.apply(x, weight, bias, accumulate, gradient_group, cut)


class ColumnLinear(ColumnParallelLinear):
    """A linear layer whose outputs are cut over tensor parallelism; x is whole on every rank, or cut by rows."""

    weight: Any
    tp_group: dist.ProcessGroup

    def __init__(self, input_size: int, output_size: int, accumulate: Accumulate, **settings: Any) -> None:
        """``settings``: megatron's."""
        super().__init__(input_size, output_size, **settings)
        self.accumulate = accumulate
        self.adapters: tuple[Any, ...] = ()
        """``mm.model.layers.lora_linear.Adapter``, which stands above."""

    def forward(
        self, x: Tensor, cut: CutRows | None = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[rows, input], or a piece of ``cut`` -> [rows, output / TP], and the bias that is already added to them.

        The caller sums the gradient of the bias.  ``keys``: of rows, for adapters' dropout.
        """
        group = self.tp_group if self.tp_group.size() > 1 else None
        y = linear(x, self.weight, None if self.bias is None else self.bias.detach(), self.accumulate, group, cut)
        for adapter in self.adapters:
            y = adapter.add_to_outputs(y, x, cut, keys)
        return y, self.bias


class RowLinear(RowParallelLinear):
    """A linear layer whose inputs are cut over tensor parallelism; its output is whole on every rank, or a piece."""

    weight: Any
    tp_group: dist.ProcessGroup

    def __init__(self, input_size: int, output_size: int, accumulate: Accumulate, **settings: Any) -> None:
        """``settings``: megatron's."""
        super().__init__(input_size, output_size, **settings)
        self.accumulate = accumulate
        self.adapters: tuple[Any, ...] = ()
        """``mm.model.layers.lora_linear.Adapter``, which stands above."""

    def forward(
        self, x: Tensor, cut: CutRows | None = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[rows, input / TP] -> [rows, output], or a piece of ``cut``, and a bias that the caller must add (or None).

        The caller sums the gradient of the bias (``RMSNorm``, ``biased``).  ``keys``: of rows, for adapters' dropout.
        """
        bias = None if self.bias is None else self.bias.detach()
        if self.tp_group.size() == 1:  # no sum over ranks: the bias is part of the product
            y, bias = linear(x, self.weight, bias, self.accumulate), None
        else:
            y = self._sum_over_ranks(linear(x, self.weight, None, self.accumulate), cut)
        if self.adapters and bias is not None:
            y, bias = y + bias, None
        for adapter in self.adapters:
            y = adapter.add_to_sum(y, x, cut, keys)
        return y, bias

    def _sum_over_ranks(self, x: Tensor, cut: CutRows | None) -> Tensor:
        return reduce_from_tensor_model_parallel_region(x, self.tp_group) if cut is None else reduce_rows(x, cut)
