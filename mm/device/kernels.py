"""The operators that differ between kinds of device, as plain functions: attention, norm, SwiGLU, rope, gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from mm.device import partial_attention, pointwise
from mm.device.accumulate import Accumulate, cpu_accumulate, cuda_accumulate, npu_accumulate
from mm.device.attention import Kernel, cpu_attention, cuda_attention, npu_attention, torch_npu
from mm.device.compiled import compiled
from mm.device.partial_attention import PartialAttention
from mm.device.pointwise import Heads, Leaf

SwiGLU = Callable[..., Tensor]
Rope = Callable[..., Heads]


@dataclass(frozen=True)
class AddNorm:
    """The leaves of a sum of rows together with its norm: ``pointwise.add_norm_fusable`` and its gradient."""

    forward: Leaf
    gradient: Leaf


@dataclass(frozen=True)
class LogitKernels:
    """Cross entropy without its matrix products: what is computed from some rows' logits, forward and backward."""

    sums: Leaf
    """``pointwise.logit_sums``, which also gives what to keep, or ``logit_sums_fusable``: the logits are kept."""
    gradient: Leaf
    """Computes the logits' gradient from what was kept."""
    is_fused: bool
    """Whether nothing of the logits' shape is made but logits and their gradient, both in their own dtype."""

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
    add_norm: AddNorm | None
    """None: a sum and its norm are operators of their own."""
    logits: LogitKernels
    swiglu: SwiGLU
    """(x [..., 2n] = [gate; up], bias) -> silu(gate) * up [..., n].  The bias, if any, is a part of x already, and its
    gradient is summed here; so is that of rope's."""
    rope: Rope
    """(qkv, cos, sin, bias) -> rotated queries, rotated keys, values; shapes and dtypes as in ``mm.device.pointwise``.
    """
    accumulate: Accumulate
    overwrites: bool = True
    """Whether ``accumulate`` can overwrite a buffer as cheaply as add to it, so that it need not be zeroed first.
    ATB's product can only add."""


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


# What Ascend's documentation says of tensors without rows: ``npu_swiglu`` and ``npu_fusion_attention`` refuse them, of
# the others nothing.  A context-parallel rank may hold none, so no operator of theirs is called for one.


def npu_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if not x.numel():
        return x * weight  # empty, yet both stay in the graph
    return torch_npu().npu_rms_norm(x, weight, epsilon=epsilon)[0]


def npu_swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    x = pointwise.biased(x, bias)
    if not x.numel():
        return x.chunk(2, dim=-1)[0]
    return torch_npu().npu_swiglu(x, dim=-1)


def npu_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A ``Rotation`` by ``npu_rotary_mul``: layout BSND with tables 1S1D, all three in the dtype of the tables.

    Its own gradient would keep x for the backward pass (its documentation), so it is only called without autograd.
    """
    if not x.numel():
        return x
    tables = (cos[None, :, None], sin[None, :, None])
    return torch_npu().npu_rotary_mul(x[None].to(cos.dtype), *tables)[0].to(x.dtype)


def npu_rope(qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
    """A leaf like ``mm.device.pointwise.rope``, with values of their own, so that ``qkv`` need not live on."""
    q, k, v = pointwise.split_and_rotate(qkv, cos, sin, npu_rotate)
    return q, k, v.clone()


def npu_rope_gradient(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, sums: bool
) -> tuple[Tensor, Tensor | None]:
    return pointwise.with_sum(pointwise.rotate_and_join(q, k, v, cos, -sin, npu_rotate), sums)


def kernels_of(kind: str, fuse: Callable[[Leaf], Leaf] | None = compiled) -> Kernels:
    """The kernels of a kind of device: "cpu", "cuda" or "npu".

    ``fuse`` makes one kernel of a leaf, for CUDA; a count of kernels gives its own.  None: leaves for eager execution.
    """
    if kind == "npu":
        rope = pointwise.rope_of(npu_rope, npu_rope_gradient)
        return Kernels(
            npu_attention, partial_attention.NPU, npu_rms_norm, None, EAGER_LOGITS, npu_swiglu, rope, npu_accumulate,
            overwrites=False,
        )
    if kind == "cuda":
        leaves = _eager() if fuse is None else _fused(fuse)
        return Kernels(cuda_attention, partial_attention.CUDA, rms_norm, *leaves, cuda_accumulate)
    return Kernels(cpu_attention, partial_attention.PLAIN, rms_norm, *_eager(), cpu_accumulate)


EAGER_LOGITS = LogitKernels(pointwise.logit_sums, pointwise.logit_gradient, is_fused=False)


def _eager() -> tuple[None, LogitKernels, SwiGLU, Rope]:
    return (None, EAGER_LOGITS, pointwise.swiglu_of(pointwise.swiglu, pointwise.swiglu_gradient),
            pointwise.rope_of(pointwise.rope, pointwise.rope_gradient))


def _fused(fuse: Callable[[Leaf], Leaf]) -> tuple[AddNorm, LogitKernels, SwiGLU, Rope]:
    rope = pointwise.split_heads(fuse(pointwise.rope_fusable))
    swiglu_gradient = pointwise.join_blocks(fuse(pointwise.swiglu_gradient_fusable))
    rope_gradient = pointwise.join_heads(fuse(pointwise.rope_gradient_fusable))
    return (AddNorm(fuse(pointwise.add_norm_fusable), fuse(pointwise.add_norm_gradient_fusable)),
            LogitKernels(fuse(pointwise.logit_sums_fusable), fuse(pointwise.logit_gradient_fusable), is_fused=True),
            pointwise.swiglu_of(fuse(pointwise.swiglu), swiglu_gradient), pointwise.rope_of(rope, rope_gradient))
