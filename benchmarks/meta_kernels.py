"""CUDA's fused kernels as operators of the meta device: one launch each, with what they read, write and keep.

Torch's own forms of these run as several kernels on another device, or not at all, and keep other tensors for the
backward pass.  ``sdpa`` and ``varlen_attn`` take the place of torch's functions, ``fused_rms_norm`` that of the norm.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("meta_step::flash_attention", mutates_args=())
def flash_attention(q: Tensor, k: Tensor, v: Tensor, flops: float) -> tuple[Tensor, Tensor]:
    """q [..., heads, rows, head_dim] -> the output and log-sum-exp, fp32 [..., heads, rows]."""
    raise NotImplementedError("the meta device only")


@flash_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, flops: float) -> tuple[Tensor, Tensor]:
    rows_first = q.transpose(-3, -2)  # the kernel writes the heads of one row side by side
    out = q.new_empty(rows_first.shape).transpose(-3, -2)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("meta_step::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, flops: float
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("the meta device only")


@flash_attention_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, flops: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep_for_attention(ctx: Any, inputs: tuple, output: tuple) -> None:
    *qkv, ctx.flops = inputs
    ctx.save_for_backward(*qkv, *output)


def _attention_backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    # Five matrix products instead of two.
    return *flash_attention_backward(gradient, *ctx.saved_tensors, 2.5 * ctx.flops), None


flash_attention.register_autograd(_attention_backward, setup_context=_keep_for_attention)


@torch.library.custom_op("meta_step::rms_norm", mutates_args=())
def fused_rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The normalised rows and, in fp32, one factor for each."""
    raise NotImplementedError("the meta device only")


@fused_rms_norm.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


@torch.library.custom_op("meta_step::rms_norm_backward_input", mutates_args=())
def rms_norm_backward_input(gradient: Tensor, x: Tensor, weight: Tensor, factors: Tensor) -> Tensor:
    raise NotImplementedError("the meta device only")


@rms_norm_backward_input.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, factors: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("meta_step::rms_norm_backward_weight", mutates_args=())
def rms_norm_backward_weight(gradient: Tensor, x: Tensor, weight: Tensor, factors: Tensor) -> Tensor:
    raise NotImplementedError("the meta device only")


@rms_norm_backward_weight.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, factors: Tensor) -> Tensor:
    return torch.empty_like(weight)


def _keep_for_norm(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _norm_backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    kept = ctx.saved_tensors  # only once: under recomputation a second look is an error
    kernels = zip((rms_norm_backward_input, rms_norm_backward_weight), ctx.needs_input_grad, strict=True)
    return tuple(kernel(gradient, *kept) if is_needed else None for kernel, is_needed in kernels)


fused_rms_norm.register_autograd(_norm_backward, setup_context=_keep_for_norm)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, **_: object) -> Tensor:
    """In place of torch's: [batch, heads, rows, head_dim]."""
    flops = 4.0 * q.numel() * k.shape[-2] * (0.5 if is_causal else 1.0)
    return flash_attention(q, k, v, flops)[0]


def varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *_: object, window_size: Sequence[int] = (-1, -1),
    enable_gqa: bool = False, **__: object,
) -> Tensor:  # fmt: skip
    """In place of torch's: [rows, heads, head_dim]."""
    pairs = float((cu_seqlens.on_host.diff().double() ** 2).sum())  # pyright: ignore[reportAttributeAccessIssue]
    flops = 4.0 * pairs * q.shape[1] * q.shape[2] * (0.5 if window_size[1] == 0 else 1.0)
    return flash_attention(*(x.transpose(0, 1) for x in (q, k, v)), flops)[0].transpose(0, 1)
