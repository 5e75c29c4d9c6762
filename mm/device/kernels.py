"""The operators that differ between kinds of device, as plain functions: attention, norm, SwiGLU, rope, gradients.

This module has their types, and the forms in plain torch that any device can use.  A device's file has its own forms,
and chooses among all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mm.device import pointwise
from mm.device.attention import Kernel, PartialAttention
from mm.device.pointwise import Heads, Leaf

Accumulate = Callable[[Tensor, Tensor, Tensor, bool], None]
"""``accumulate(buffer, gradient, x, overwrites)``: buffer += gradient^T x, summed in fp32 for all dtypes.
If it overwrites: buffer = gradient^T x.

Gradient [rows, output] and x [rows, input] share one dtype: bf16, fp16 or fp32; ``buffer`` [output, input] is fp32 or
of that dtype.  The product of 16-bit rows is never rounded to their dtype on its way into an fp32 buffer, or stored on
its own."""
SwiGLUKernel = Callable[..., Tensor]
RopeKernel = Callable[..., Heads]
Fuse = Callable[[Leaf], Leaf]
"""Turns a leaf into one kernel, like ``mm.device.compiled.compiled``; tests pass functions that count leaves."""


@dataclass(frozen=True)
class AddNormLeaves:
    """The leaves of a sum of rows together with its norm: ``pointwise.add_norm_fusable`` and its gradient."""

    forward: Leaf
    gradient: Leaf


@dataclass(frozen=True)
class LogitKernels:
    """Cross entropy without its matrix products: the computations on some rows' logits, forward and backward."""

    sums: Leaf
    """``pointwise.logit_sums``, which also gives what to keep, or ``logit_sums_fusable``: the logits are kept."""
    gradient: Leaf
    """Computes the logits' gradient from what was kept."""
    is_fused: bool
    """Whether the only tensors of the logits' shape are logits and their gradient, both in the logits' dtype."""

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The largest logit of each row and the sum of e^(logit - largest), fp32 [rows, 1], and what to keep."""
        return (*self.sums(logits), logits) if self.is_fused else self.sums(logits)

    def kept(self, logits: Tensor, row_max: Tensor) -> Tensor:
        """What ``forward`` would keep of these logits."""
        return logits if self.is_fused else pointwise.exponentials(logits, row_max)


@dataclass(frozen=True)
class Kernels:
    """One device's operators."""

    attention: Kernel
    partial_attention: PartialAttention
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [..., n], weight [n], epsilon): statistics in fp32."""
    add_norm: AddNormLeaves | None
    """None: a sum and its norm are separate operators."""
    logits: LogitKernels
    swiglu: SwiGLUKernel
    """(x [..., 2n] = [gate; up], bias) -> silu(gate) * up [..., n].  The bias, if any, is already added to x, and its
    gradient is summed here; the same holds for rope."""
    rope: RopeKernel
    """(qkv, cos, sin, bias) -> rotated queries, rotated keys, values; shapes and dtypes as in
    ``mm.device.pointwise``."""
    accumulate: Accumulate
    rounded_at_random: Leaf = pointwise.rounded_at_random
    """``pointwise.rounded_at_random``, as one kernel where leaves are compiled."""
    overwrites: bool = True
    """Whether ``accumulate`` can overwrite a buffer as cheaply as add to it, so that the buffer need not be zeroed
    first.  ATB's product can only add."""


def plain_accumulate(buffer: Tensor, gradient: Tensor, x: Tensor, overwrites: bool = False) -> None:
    """An ``Accumulate`` that casts the rows to the dtype of the buffer: the CPU multiplies only equal dtypes."""
    gradient, x = gradient.to(buffer.dtype), x.to(buffer.dtype)
    if overwrites:
        torch.mm(gradient.t(), x, out=buffer)
    else:
        buffer.addmm_(gradient.t(), x)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


EAGER_LOGITS = LogitKernels(pointwise.logit_sums, pointwise.logit_gradient, is_fused=False)


def eager_leaves() -> tuple[None, LogitKernels, SwiGLUKernel, RopeKernel]:
    """``add_norm``, ``logits``, ``swiglu`` and ``rope`` of ``Kernels`` from leaves for eager execution."""
    return (None, EAGER_LOGITS, pointwise.swiglu_of(pointwise.swiglu, pointwise.swiglu_gradient),
            pointwise.rope_of(pointwise.rope, pointwise.rope_gradient))


def fused_leaves(fuse: Fuse) -> tuple[AddNormLeaves, LogitKernels, SwiGLUKernel, RopeKernel]:
    """The same four, from leaves that ``fuse`` turns into one kernel each."""
    rope = pointwise.split_heads(fuse(pointwise.rope_fusable))
    swiglu_gradient = pointwise.join_blocks(fuse(pointwise.swiglu_gradient_fusable))
    rope_gradient = pointwise.join_heads(fuse(pointwise.rope_gradient_fusable))
    return (AddNormLeaves(fuse(pointwise.add_norm_fusable), fuse(pointwise.add_norm_gradient_fusable)),
            LogitKernels(fuse(pointwise.logit_sums_fusable), fuse(pointwise.logit_gradient_fusable), is_fused=True),
            pointwise.swiglu_of(fuse(pointwise.swiglu), swiglu_gradient), pointwise.rope_of(rope, rope_gradient))
