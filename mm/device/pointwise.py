"""SwiGLU, rope, the norm of a sum and the loss's logits: work that one pass over memory can do, forward and backward.

A *kernel function* maps tensors to tensors without autograd inside; ``swiglu_of``, ``rope_of`` and
``mm.model.layers.norm`` make such a function and its gradient differentiable.  Two sets have the same mathematics:
those for eager execution write in place, because each operation is a pass over memory; those to be fused do not write,
so that a compiler can turn each into one kernel.  Gradients of biases are column sums of what is computed here.

``qkv`` holds, per group of queries, the group's queries, one key and one value: [num_tokens, num_groups,
heads_per_group + 2, head_dim].  ``cos`` and ``sin`` are [num_tokens, head_dim], both halves of the last axis equal.
Rope computes in the wider dtype of ``qkv`` and the tables and returns that of ``qkv``: as in transformers, float32 for
the ViT and the model's dtype for the LLM.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

KernelFunction = Callable[..., Any]
Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [num_tokens, num_heads, head_dim], keys and values [num_tokens, num_groups, head_dim]."""


# Kernel functions for eager execution


def swiglu(x: Tensor) -> Tensor:
    """x [..., 2n] = [gate; up] -> silu(gate) * up [..., n].  Both for eager execution and to be fused."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_gradient(gradient: Tensor, x: Tensor, sums: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient of ``x``, both halves written into one buffer; with ``sums`` the sum of its rows."""
    gate, up = x.chunk(2, dim=-1)
    x_gradient = torch.empty_like(x)
    gate_gradient, up_gradient = x_gradient.chunk(2, dim=-1)
    torch.mul(F.silu(gate), gradient, out=up_gradient)
    torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=gate_gradient)
    return x_gradient, x_gradient.sum(0) if sums else None


def rope(qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
    """Split ``qkv``, and rotate queries and keys.  The values are a view, and keep all of ``qkv`` alive."""
    return split_and_rotate(qkv, cos, sin, _rotate_in_place)


def rope_gradient(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of ``qkv`` from those of its heads: a rotation's gradient is the rotation by the opposite angle.

    With ``sums`` also the sum of its rows, with all heads in one axis.
    """
    return with_sum(rotate_and_join(q, k, v, cos, -sin, _rotate_in_place), sums)


def logit_sums(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logit of each row and the row's sum of e^(logit - largest), both [rows, 1] in fp32, and the
    exponentials themselves in fp32.  Logits in fp32 are overwritten."""
    row_max = logits.amax(1, keepdim=True).float()
    found = exponentials(logits, row_max)
    return row_max, found.sum(1, keepdim=True), found


def exponentials(logits: Tensor, row_max: Tensor) -> Tensor:
    """e^(logit - largest of its row) in fp32; fp32 logits are overwritten, those in 16 bits are widened on the way."""
    return (logits.sub_(row_max) if logits.dtype == row_max.dtype else logits - row_max).exp_()


def logit_gradient(
    found: Tensor, _: Tensor, to_gradient: Tensor, target: Tensor, at_target: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient of logits, in ``dtype``, from their ``exponentials``, which are overwritten.

    Each exponential is multiplied by ``to_gradient``; ``at_target`` is subtracted at the ``target``.  All tensors but
    the first are [rows, 1].
    """
    return found.mul_(to_gradient).scatter_add_(1, target, -at_target).to(dtype)


# Kernel functions to be fused


def logit_sums_fusable(logits: Tensor) -> tuple[Tensor, Tensor]:
    """``logit_sums`` without the exponentials, which the backward pass computes again."""
    wide = logits.float()
    row_max = wide.amax(1, keepdim=True)
    return row_max, (wide - row_max).exp().sum(1, keepdim=True)


def logit_gradient_fusable(
    logits: Tensor, row_max: Tensor, to_gradient: Tensor, target: Tensor, at_target: Tensor, dtype: torch.dtype
) -> Tensor:
    """``logit_gradient`` from the logits themselves, without writes."""
    found = (logits.float() - row_max).exp() * to_gradient
    is_target = torch.arange(logits.shape[1], device=logits.device) == target
    return torch.where(is_target, found - at_target, found).to(dtype)


SUMMED_ROWS = 64
"""Rows per partial sum of columns in a compiled function; a second kernel adds the partial sums."""


def swiglu_gradient_fusable(gradient: Tensor, x: Tensor, sums: bool) -> tuple[Tensor, Tensor | None]:
    """``swiglu_gradient`` without writes.  With ``sums`` the rows come in blocks, to be joined by ``join_blocks``."""
    if sums:
        num_rows = len(gradient)
        gradient, x = _in_blocks(gradient, num_rows).float(), _in_blocks(x, num_rows)
    gate, up = x.to(gradient.dtype).chunk(2, dim=-1)
    found = torch.cat((torch.ops.aten.silu_backward(gradient * up, gate), F.silu(gate) * gradient), dim=-1)
    return found.to(x.dtype), _sum_of_blocks(found, x.dtype) if sums else None


def rope_fusable(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``rope`` without writes, all heads in one buffer: first all queries, then all keys, then all values.

    Thus one kernel writes all of them, and ``qkv`` can be freed.
    """
    return torch.cat(split_and_rotate(qkv, cos, sin, _rotate), dim=1)


def rope_gradient_fusable(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """``rope_gradient`` without writes.  With ``sums`` the rows come in blocks and all heads in one axis, to be joined
    by ``join_blocks``."""
    if not sums:
        return rotate_and_join(q, k, v, cos, -sin, _rotate), None
    num_rows, groups, dtype = len(q), k.shape[1], q.dtype
    q, k, v, cos, sin = (_in_blocks(one, num_rows) for one in (q, k, v, cos, sin))
    q, k = (_rotate(one.float(), cos, -sin) for one in (q, k))
    heads = (q.unflatten(2, (groups, q.shape[2] // groups)), k.unsqueeze(3), v.float().unsqueeze(3))
    found = torch.cat(heads, dim=3).flatten(2)
    return found.to(dtype), _sum_of_blocks(found, dtype)


def _in_blocks(x: Tensor, num_rows: int) -> Tensor:
    """[num_rows, ...] -> [blocks, ``SUMMED_ROWS``, ...], the last block padded with zeros.

    A compiler can merge the sums of blocks with the work on their rows, because both loops have the same sizes.
    """
    torch._check(len(x) == num_rows)  # so that a compiler has one symbol for the rows of all arguments
    num_blocks = (num_rows + SUMMED_ROWS - 1) // SUMMED_ROWS
    filled = F.pad(x, (0, 0) * (x.ndim - 1) + (0, num_blocks * SUMMED_ROWS - num_rows))
    return filled.unflatten(0, (num_blocks, SUMMED_ROWS))


def _sum_of_blocks(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[blocks, rows, width] -> [width]: the kernel that makes x makes partial sums, and a second one adds them."""
    return x.sum(1).sum(0).to(dtype)


def add_norm_fusable(
    x: Tensor, added: Tensor | None, bias: Tensor | None, weight: Tensor, epsilon: float, index: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """x + (added + bias), None if it is x itself; its root-mean-square norm; and each row's factor in fp32.

    ``weight`` and ``bias`` are [1, width], because a compiler treats the first axis as rows.  ``index``: row i of the
    result is the sum of the rows ``index[i]``; None: of the rows i.
    """
    total = None
    if index is not None:
        x = total = x.index_select(0, index)
        added = None if added is None else added.index_select(0, index)
    if added is not None:
        x = total = x + (added if bias is None else added + bias)
    wide = x.float()
    factors = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return total, (wide * factors * weight.float()).to(x.dtype), factors


def add_norm_gradient_fusable(
    total_gradient: Tensor | None, gradient: Tensor, total: Tensor, factors: Tensor, weight: Tensor, sums: bool,
    sums_total: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient of each summand of ``total``, from the gradients of both results.

    With ``sums`` also the gradient of the weight, and with ``sums_total`` the sum of the rows of ``total_gradient``,
    both in fp32.  ``total_gradient`` is None if only the norm was used.
    """
    total_sum = None
    wide, normalised = gradient.float(), total.float() * factors
    scaled = wide * weight.float()
    found = factors * (scaled - normalised * (scaled * normalised).mean(-1, keepdim=True))
    if total_gradient is not None:
        wide_total = total_gradient.float()
        found = found + wide_total
        if sums_total:  # Inductor merges sums of columns that read the same rows: here those of ``total``
            total_sum = torch.where(total.isnan(), total.float(), wide_total).sum(0)
    return found.to(total.dtype), (wide * normalised).sum(0) if sums else None, total_sum


# Shared by all forms of rope, also those with an accelerator's own operators

Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [num_tokens, heads, head_dim], cos, sin) -> x * cos + rotate_half(x) * sin, in the dtype of x."""


def split_and_rotate(qkv: Tensor, cos: Tensor, sin: Tensor, rotate: Rotation) -> Heads:
    q, k, v = qkv.split((qkv.shape[2] - 2, 1, 1), dim=2)
    return rotate(q.flatten(1, 2), cos, sin), rotate(k.squeeze(2), cos, sin), v.squeeze(2)


def rotate_and_join(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, rotate: Rotation) -> Tensor:
    groups = k.shape[1]
    q = rotate(q, cos, sin).unflatten(1, (groups, q.shape[1] // groups))
    return torch.cat((q, rotate(k, cos, sin).unsqueeze(2), v.unsqueeze(2)), dim=2)


def with_sum(x: Tensor, sums: bool) -> tuple[Tensor, Tensor | None]:
    """x [rows, ...], and with ``sums`` the sum of its rows, with the other axes flattened."""
    return x, x.flatten(1).sum(0) if sums else None


def _rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Unlike ``_rotate``, does not negate and join the halves out of place: a quarter faster on the CPU."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None], sin[:, None, :half]
    rotated = x * cos
    rotated[..., :half] -= x[..., half:] * sin
    rotated[..., half:] += x[..., :half] * sin
    return rotated.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos.unsqueeze(-2) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(-2)).to(x.dtype)


# Differentiable functions


class _SwiGLU(torch.autograd.Function):
    """Keeps x alone; autograd's own form keeps silu(gate) too and joins the two gradients by a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor | None, function: KernelFunction, gradient: KernelFunction) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient_function = gradient
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return *ctx.gradient_function(gradient, x, ctx.needs_input_grad[1]), None, None


class _Rope(torch.autograd.Function):
    """Keeps the tables alone.  No gradient flows into them."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, _: Tensor | None, function: KernelFunction,
        gradient: KernelFunction,
    ) -> Heads:
        ctx.save_for_backward(cos, sin)
        ctx.gradient_function = gradient
        return function(qkv, cos, sin)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
        found, total = ctx.gradient_function(q, k, v, *ctx.saved_tensors, ctx.needs_input_grad[3])
        return found, None, None, total, None, None


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        return with_sum(gradient, ctx.needs_input_grad[1])


def biased(x: Tensor, bias: Tensor | None) -> Tensor:
    """``x``, which already includes ``bias``; the gradient of the bias is summed here."""
    return x if bias is None else _Biased.apply(x, bias)


def swiglu_of(function: KernelFunction, gradient: KernelFunction) -> Callable[..., Tensor]:
    """A differentiable SwiGLU of (x, bias) from functions like ``swiglu`` and ``swiglu_gradient``."""

    @functools.wraps(function)
    def swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return _SwiGLU.apply(x, bias, function, gradient)

    return swiglu


def rope_of(function: KernelFunction, gradient: KernelFunction) -> Callable[..., Heads]:
    """A differentiable rope of (qkv, cos, sin, bias) from functions like ``rope`` and ``rope_gradient``."""

    @functools.wraps(function)
    def rope(qkv: Tensor, cos: Tensor, sin: Tensor, bias: Tensor | None = None) -> Heads:
        return _Rope.apply(qkv, cos, sin, bias, function, gradient)

    return rope


def split_heads(function: KernelFunction) -> KernelFunction:
    """A function like ``rope`` from one like ``rope_fusable``.  Not compiled: the compiler would undo the join."""

    @functools.wraps(function)
    def call(qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
        groups = qkv.shape[1]
        q, k, v = function(qkv, cos, sin).split((groups * (qkv.shape[2] - 2), groups, groups), dim=1)
        return q, k, v

    return call


def join_blocks(function: KernelFunction) -> KernelFunction:
    """A function like ``swiglu_gradient`` from ``swiglu_gradient_fusable``'s form.  Not compiled: it would copy
    rows."""

    @functools.wraps(function)
    def call(gradient: Tensor, x: Tensor, sums: bool) -> tuple[Tensor, Tensor | None]:
        found, total = function(gradient, x, sums)
        return (found.flatten(0, 1)[: len(x)] if sums else found), total

    return call


def join_heads(function: KernelFunction) -> KernelFunction:
    """The same for a function like ``rope_gradient_fusable``."""

    @functools.wraps(function)
    def call(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, sums: bool
    ) -> tuple[Tensor, Tensor | None]:
        found, total = function(q, k, v, cos, sin, sums)
        groups, head_dim = k.shape[1:]
        shape = (len(q), groups, q.shape[1] // groups + 2, head_dim)
        return (found.flatten(0, 1)[: len(q)].view(shape) if sums else found), total

    return call


# Hashes in place of random numbers: the same wherever, and in whatever order, they are computed

BITS = 0xFFFFFFFF
ROUNDED_AT_ONCE = 1 << 24
"""Elements to round in one call: where it is not compiled, each int64 intermediate takes 128 MiB."""
_DROPPED_BITS = 16
"""Bits of an fp32 number that bf16 does not have."""


def mixed(numbers: Tensor) -> Tensor:
    """Hash int64 numbers in 0 to 2^32 - 1 into the same range.

    The rounds of "[16 21f0aaad 15 735a2d97 15]" from https://github.com/skeeto/hash-prospector.  Its factors are below
    2^31, so no product overflows int64.
    """
    numbers = (numbers ^ (numbers >> 16)) * 0x21F0AAAD & BITS
    numbers = (numbers ^ (numbers >> 15)) * 0x735A2D97 & BITS
    return numbers ^ (numbers >> 15)


def rounded_at_random(values: Tensor, salts: Tensor, step: Tensor) -> Tensor:
    """Round fp32 [n] ``values`` to bf16 stochastically: up or down, so that the mean is right.

    A hash of the fp32 bits of ``salts`` [n] and of ``step`` [1] decides, so equal arguments have equal results on every
    device.  Values that bf16 can represent are kept.
    """
    noise = mixed(_bits_of(salts) ^ mixed(_bits_of(step))) >> (32 - _DROPPED_BITS)
    bits = (values.view(torch.int32).to(torch.int64) + noise) >> _DROPPED_BITS << _DROPPED_BITS
    rounded = bits.to(torch.int32).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _bits_of(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int32).to(torch.int64) & BITS
