"""Root-mean-square norms of the residual stream, whose sums they make in the same pass where the device can."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mm.device.kernels import AddNorm, Kernels
from mm.parallel.gradients import gradient_buffer, gradient_from


class Residual(NamedTuple):
    """Rows [rows, hidden] of the residual stream and what a sublayer adds to them: the norm that reads the sum makes
    it."""

    rows: Tensor
    added: Tensor | None = None
    bias: Tensor | None = None
    """[hidden], which is part of ``added`` and not in it yet."""

    def total(self) -> Tensor:
        if self.added is None:
            return self.rows
        return self.rows + (self.added if self.bias is None else self.added + self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm with statistics in fp32."""

    def __init__(self, weight: nn.Parameter, epsilon: float, kernels: Kernels) -> None:
        """``weight``: [hidden]."""
        super().__init__()
        self.weight, self.epsilon = weight, epsilon
        self.kernel, self.fused = kernels.rms_norm, kernels.add_norm

    def forward(self, x: Residual) -> tuple[Tensor, Tensor]:
        """The sum and its norm."""
        if self.fused is None:
            total = x.total()
            return total, self.again(total)
        return _AddNorm.apply(*x, self.weight, self.epsilon, self.fused)

    def again(self, total: Tensor) -> Tensor:
        """The norm of a sum, alone."""
        return self.kernel(total, self.weight, self.epsilon)


class _AddNorm(torch.autograd.Function):
    """Keeps the sum and a number for each row; the gradient of the weight is added to its buffer in fp32.

    ``ctx`` carries whatever forward leaves on it for backward, so it has no type.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, bias: Tensor | None, weight: Tensor, epsilon: float, fused: AddNorm
    ) -> tuple[Tensor, Tensor]:
        total, normed, factors = fused.forward(
            x, added, None if bias is None else bias[None], weight[None], epsilon)
        total = x if total is None else total
        ctx.save_for_backward(total, factors)
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.fused = weight, fused
        return total, normed

    @staticmethod
    def backward(ctx: Any, total_gradient: Tensor | None, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        weight_gradient, found = None, total_gradient
        if gradient is not None:
            trains = ctx.needs_input_grad[3]
            found, summed = ctx.fused.gradient(
                total_gradient, gradient, *ctx.saved_tensors, ctx.weight[None], trains)
            if trains:
                buffer = gradient_buffer(ctx.weight)
                buffer.add_(summed)
                weight_gradient = gradient_from(buffer, ctx.weight)
        bias_gradient = found.sum(0) if ctx.needs_input_grad[2] and found is not None else None
        of_x, of_added, *_ = (found if is_needed else None for is_needed in ctx.needs_input_grad)
        return of_x, of_added, bias_gradient, weight_gradient, None, None
