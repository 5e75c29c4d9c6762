"""Moving rows by distinct indices.

Autograd's gradient of ``x[index]`` sorts and sums, and that of ``index_copy`` fills by index, for which some NPUs wait
for the host at every index.  Here each gradient is a selection and at most one copy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Permutation:
    """A permutation of rows, with its inverse for the way back."""

    index: Tensor
    """int64 [num_rows]: row i of the result is row ``index[i]``."""
    inverse: Tensor

    @classmethod
    def of(cls, index: Tensor) -> "Permutation":
        """From host indices."""
        inverse = torch.empty_like(index)
        inverse[index] = torch.arange(index.numel())
        return cls(index, inverse)

    def reversed(self) -> "Permutation":
        return Permutation(self.inverse, self.index)

    def to_device(self, copy: Callable[[Tensor], Tensor]) -> "Permutation":
        """``copy``: ``Device.copy``."""
        return Permutation(copy(self.index), copy(self.inverse))

    def __call__(self, rows: Tensor) -> Tensor:
        return _Permute.apply(rows, self.index, self.inverse)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


def replace_rows(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """A copy of ``x`` whose rows ``index``, all distinct, are ``rows``."""
    return _Replacement.apply(x, index, rows)


class _Replacement(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return x.index_copy(0, index, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (index,) = ctx.saved_tensors
        x_gradient = rows_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = gradient.index_copy(0, index, gradient.new_zeros(len(index), *gradient.shape[1:]))
        if ctx.needs_input_grad[2]:
            rows_gradient = gradient.index_select(0, index)
        return x_gradient, None, rows_gradient
