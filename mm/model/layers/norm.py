"""RMS norms of the residual stream, fused with its additions if the device can."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mm.device.kernels import AddNormKernels, Kernels
from mm.device.pointwise import biased
from mm.model.parallel.rows import Permutation
from mm.parallel.zero.gradient_buffers import gradient_buffer, gradient_from


class Residual(NamedTuple):
    """Rows [rows, hidden] of the residual stream, and what a sublayer adds to them.

    The next norm computes the sum, and puts its rows in order.
    """

    rows: Tensor
    added: Tensor | None = None
    bias: Tensor | None = None
    """[hidden]: still to be added to ``added``.  It has no gradient here: the norm before the sublayer sums that."""
    order: Permutation | None = None
    """New order of the sum's rows; None: unchanged."""

    def total(self) -> Tensor:
        total = self.rows
        if self.added is not None:
            total = total + (self.added if self.bias is None else self.added + self.bias)
        return total if self.order is None else self.order(total)

    def ordered(self, order: Permutation) -> "Residual":
        return self._replace(order=order) if self.order is None else Residual(self.total(), order=order)


class RMSNorm(nn.Module):
    """Root-mean-square norm with statistics in fp32."""

    def __init__(self, weight: nn.Parameter, epsilon: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon
        self.kernel, self.fused = kernels.rms_norm, kernels.add_norm

    def forward(self, x: Residual, next_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The sum and its norm.

        ``next_bias``: the bias of the sublayer's last product, which is added to the sum.  Its gradient, the sum of
        the rows of that addition's gradient, is computed here from the gradient of the returned sum.  So nothing but
        the addition may use the returned sum.
        """
        assert x.bias is None or not x.bias.requires_grad, "the norm before the sublayer sums its gradient"
        if self.fused is None:
            total = x.total()
            normed = self.again(total)  # first: autograd adds a tensor's gradients in the reverse order of its uses
            return biased(total, next_bias), normed
        return _AddNorm.apply(x.rows, x.added, x.bias, self.weight, next_bias, self.epsilon, self.fused, x.order)

    def again(self, total: Tensor) -> Tensor:
        """Only the norm, of a sum that is already computed."""
        return self.kernel(total, self.weight, self.epsilon)


class _AddNorm(torch.autograd.Function):
    """Keeps the sum and one number per row, and adds the gradients of weight and next bias to their buffers in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, bias: Tensor | None, weight: Tensor, next_bias: Tensor | None,
        epsilon: float, fused: AddNormKernels, order: Permutation | None,
    ) -> tuple[Tensor, Tensor]:
        total, normed, factors = fused.forward(
            x, added, None if bias is None else bias[None], weight[None], epsilon,
            None if order is None else order.index)
        total = x if total is None else total
        ctx.save_for_backward(total, factors)
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.next_bias, ctx.fused, ctx.order = weight, next_bias, fused, order
        return total, normed

    @staticmethod
    def backward(ctx: Any, total_gradient: Tensor | None, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        weight_sum, bias_sum, found = None, None, total_gradient
        trains, sums_total = ctx.needs_input_grad[3], ctx.needs_input_grad[4] and total_gradient is not None
        if gradient is not None:
            found, weight_sum, bias_sum = ctx.fused.gradient(
                total_gradient, gradient, *ctx.saved_tensors, ctx.weight[None], trains, sums_total)
        elif total_gradient is not None and sums_total:
            bias_sum = total_gradient.float().sum(0)
        if ctx.order is not None and found is not None:
            found = found.index_select(0, ctx.order.inverse)
        of_x, of_added, *_ = (found if is_needed else None for is_needed in ctx.needs_input_grad)
        return of_x, of_added, None, _add(ctx.weight, weight_sum), _add(ctx.next_bias, bias_sum), None, None, None


def _add(weight: Any, found: Tensor | None) -> Tensor | None:
    """Add a gradient in fp32 to the buffer of its weight."""
    if found is None:
        return None
    buffer = gradient_buffer(weight)
    buffer.add_(found)
    return gradient_from(buffer, weight)
