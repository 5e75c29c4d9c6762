"""megatron-core's tensor-parallel linear layers with our own local arithmetic.

megatron gives the layers their weights, cuts and groups; this module replaces what a rank computes with its cut: the
bias is part of the matrix product, and the weight's gradient is accumulated into megatron's fp32 gradient buffer by
the product itself where the dtypes allow, instead of being made, kept and added (what apex's fused kernel does).
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


class _Linear(torch.autograd.Function):
    """x W^T + b; the gradient of x is summed over ``group`` while the gradient of W is computed.

    ``ctx`` carries whatever forward leaves on it for backward, so it has no type.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None, accumulates: bool
    ) -> Tensor:
        needs_x = weight.requires_grad
        ctx.save_for_backward(x if needs_x else None)
        ctx.weight, ctx.group, ctx.has_bias, ctx.accumulates = weight, group, bias is not None, accumulates
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x_gradient = weight_gradient = bias_gradient = reduction = None
        if ctx.needs_input_grad[0]:
            x_gradient = gradient @ ctx.weight
            if ctx.group is not None:
                reduction = dist.all_reduce(x_gradient, group=ctx.group, async_op=True)
        if ctx.needs_input_grad[1]:
            weight_gradient = _weight_gradient(ctx.weight, gradient, x, ctx.accumulates)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            bias_gradient = gradient.sum(0)
        if reduction is not None:
            reduction.wait()
        return x_gradient, weight_gradient, bias_gradient, None, None


def _weight_gradient(weight: Tensor, gradient: Tensor, x: Tensor, accumulates: bool) -> Tensor:
    """The gradient of ``weight``, or, once it is in megatron's buffer, a stand-in nobody reads.

    megatron's hook skips adding a gradient whose parameter says ``grad_added_to_main_grad``, but it must be called,
    so something must be returned.
    """
    buffer = getattr(weight, "main_grad", None)
    if not accumulates or buffer is None or buffer.dtype != weight.dtype:
        return gradient.t() @ x
    buffer.addmm_(gradient.t(), x)
    weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]  (megatron's mark)
    return torch.empty_like(weight)


class ColumnLinear(ColumnParallelLinear):
    """A linear layer whose outputs are cut over tensor parallelism; x is whole on every rank."""

    tp_group: dist.ProcessGroup

    def forward(self, x: Tensor, shared_weight: Tensor | None = None) -> Tensor:
        """[rows, input] -> [rows, output / TP].

        ``shared_weight`` stands in for the layer's own; because it is used elsewhere in the same pass, its gradient
        is left to autograd to add up.
        """
        weight = self.weight if shared_weight is None else shared_weight
        group = self.tp_group if self.tp_group.size() > 1 else None
        return _Linear.apply(x, weight, self.bias, group, shared_weight is None)


class RowLinear(RowParallelLinear):
    """A linear layer whose inputs are cut over tensor parallelism; its output is whole on every rank."""

    tp_group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        """[rows, input / TP] -> [rows, output]."""
        if self.tp_group.size() == 1:
            return _Linear.apply(x, self.weight, self.bias, None, True)
        x = reduce_from_tensor_model_parallel_region(_Linear.apply(x, self.weight, None, None, True), self.tp_group)
        return x if self.bias is None else x + self.bias
