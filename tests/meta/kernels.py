"""CUDA's fused kernels as operators of the meta device: one launch each, with the tensors they read, write and keep.

On another device, torch's own forms run as several kernels or not at all, and keep other tensors for the backward pass.
``sdpa`` and ``varlen_attn`` replace torch's functions, ``fused_rms_norm`` the norm.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def _operator(schema: str, make: Callable[..., Any]) -> Any:
    """An operator that the meta device alone has; ``make`` gives its empty results."""
    name = f"meta_step::{schema.partition('(')[0]}"
    torch.library.define(name, schema.removeprefix(schema.partition("(")[0]))
    torch.library.register_fake(name, make)
    return getattr(torch.ops.meta_step, name.removeprefix("meta_step::"))


def _attended(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """The output, with the heads of a row next to each other in memory, and the log-sum-exp."""
    out = q.new_empty(q.transpose(-3, -2).shape).transpose(-3, -2)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _normalised(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """The normalised rows and, in fp32, one factor for each."""
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


flash_attention = _operator("flash_attention(Tensor q, Tensor k, Tensor v, float flops) -> (Tensor, Tensor)", _attended)
"""q, k, v [..., heads, rows, head_dim] -> the output and log-sum-exp [..., heads, rows]."""
flash_attention_backward = _operator(
    "flash_attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float flops) -> "
    "(Tensor, Tensor, Tensor)",
    lambda _, q, k, v, *__: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
)
fused_rms_norm = _operator("rms_norm(Tensor x, Tensor weight) -> (Tensor, Tensor)", _normalised)
rms_norm_backward_input = _operator(
    "rms_norm_backward_input(Tensor gradient, Tensor x, Tensor weight, Tensor factors) -> Tensor",
    lambda _, x, *__: torch.empty_like(x),
)
rms_norm_backward_weight = _operator(
    "rms_norm_backward_weight(Tensor gradient, Tensor x, Tensor weight, Tensor factors) -> Tensor",
    lambda _, __, weight, *___: torch.empty_like(weight),
)


def _keep_for_attention(ctx: Any, inputs: tuple, output: tuple) -> None:
    *qkv, ctx.flops = inputs
    ctx.save_for_backward(*qkv, *output)


def _attention_backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    # Five matrix products instead of two.
    return *flash_attention_backward(gradient, *ctx.saved_tensors, 2.5 * ctx.flops), None


torch.library.register_autograd(
    "meta_step::flash_attention", _attention_backward, setup_context=_keep_for_attention)


def _keep_for_norm(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _norm_backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    kept = ctx.saved_tensors  # only once: under recomputation a second access is an error
    kernels = zip((rms_norm_backward_input, rms_norm_backward_weight), ctx.needs_input_grad, strict=True)
    return tuple(kernel(gradient, *kept) if is_needed else None for kernel, is_needed in kernels)


torch.library.register_autograd("meta_step::rms_norm", _norm_backward, setup_context=_keep_for_norm)


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
