"""SwiGLU, rope and the norm of a sum: what one pass over memory can compute, forward and backward.

A *leaf* here is a function from tensors to tensors without autograd inside.  Each pair of leaves, a function and its
gradient, becomes differentiable in ``swiglu_of`` and ``rope_of``, and that of the norm in ``mm.model.norm``; they keep
no more for the backward pass than needed.
There are two sets of leaves with the same mathematics: those for eager execution write in place, because each of their
operations is a pass over memory; those to be fused are free of writes, so that a compiler makes one kernel of each.

The fused projection of attention holds, per group of queries, the group's queries, one key and one value: ``qkv`` is
[num_tokens, num_groups, heads_per_group + 2, head_dim].  ``cos`` and ``sin`` are [num_tokens, head_dim], both halves of
the last axis equal.  Rope computes in the wider dtype of ``qkv`` and the tables and returns that of ``qkv``.  The
tables' dtype thus chooses the arithmetic of transformers: its ViT rotates in float32 and casts back (float32 tables),
its language model rotates in the dtype of the model (tables cast to it).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Leaf = Callable[..., Any]
Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [num_tokens, num_heads, head_dim], keys and values [num_tokens, num_groups, head_dim]."""


# Leaves for eager execution


def swiglu(x: Tensor) -> Tensor:
    """x [..., 2n] = [gate; up] -> silu(gate) * up [..., n].  For both ways of execution."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``x``, both halves written into one buffer."""
    gate, up = x.chunk(2, dim=-1)
    x_gradient = torch.empty_like(x)
    gate_gradient, up_gradient = x_gradient.chunk(2, dim=-1)
    torch.mul(F.silu(gate), gradient, out=up_gradient)
    torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=gate_gradient)
    return x_gradient


def rope(qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
    """Take ``qkv`` apart and rotate queries and keys.  The values are a view, and keep all of ``qkv`` alive."""
    return split_and_rotate(qkv, cos, sin, _rotate_in_place)


def rope_gradient(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of ``qkv`` from those of its heads: a rotation's gradient is the rotation by the opposite angle."""
    return rotate_and_join(q, k, v, cos, -sin, _rotate_in_place)


# Leaves to be fused


def swiglu_gradient_fusable(gradient: Tensor, x: Tensor) -> Tensor:
    """``swiglu_gradient`` without writes."""
    gate, up = x.chunk(2, dim=-1)
    return torch.cat((torch.ops.aten.silu_backward(gradient * up, gate), F.silu(gate) * gradient), dim=-1)


def rope_fusable(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``rope`` without writes, all heads in one buffer: first all queries, then all keys, then all values.

    So one kernel writes all of them, and ``qkv`` need not live on.
    """
    return torch.cat(split_and_rotate(qkv, cos, sin, _rotate), dim=1)


def rope_gradient_fusable(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``rope_gradient`` without writes."""
    return rotate_and_join(q, k, v, cos, -sin, _rotate)


def add_norm_fusable(
    x: Tensor, added: Tensor | None, bias: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor | None, Tensor, Tensor]:
    """x + (added + bias), None where nothing is added; its root-mean-square norm; and, in fp32, the factor of each row.

    ``weight`` and ``bias`` are [1, width], for a compiler takes the first axis for rows.
    """
    total = None
    if added is not None:
        x = total = x + (added if bias is None else added + bias)
    wide = x.float()
    factors = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return total, (wide * factors * weight.float()).to(x.dtype), factors


def add_norm_gradient_fusable(
    total_gradient: Tensor | None, gradient: Tensor, total: Tensor, factors: Tensor, weight: Tensor, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of each summand of ``total`` from those of both results; with ``sums`` that of the weight, in fp32.

    ``total_gradient`` is None where only the norm was used.
    """
    wide, normalised = gradient.float(), total.float() * factors
    scaled = wide * weight.float()
    found = factors * (scaled - normalised * (scaled * normalised).mean(-1, keepdim=True))
    if total_gradient is not None:
        found = found + total_gradient.float()
    return found.to(total.dtype), (wide * normalised).sum(0) if sums else None


# What the leaves of rope share, those of an accelerator's own operators too

Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [num_tokens, heads, head_dim], cos, sin) -> x * cos + rotate_half(x) * sin, in the dtype of x."""


def split_and_rotate(qkv: Tensor, cos: Tensor, sin: Tensor, rotate: Rotation) -> Heads:
    q, k, v = qkv.split((qkv.shape[2] - 2, 1, 1), dim=2)
    return rotate(q.flatten(1, 2), cos, sin), rotate(k.squeeze(2), cos, sin), v.squeeze(2)


def rotate_and_join(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, rotate: Rotation) -> Tensor:
    groups = k.shape[1]
    q = rotate(q, cos, sin).unflatten(1, (groups, q.shape[1] // groups))
    return torch.cat((q, rotate(k, cos, sin).unsqueeze(2), v.unsqueeze(2)), dim=2)


def _rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The halves are not negated and joined out of place, as ``_rotate`` does: a quarter faster on the CPU."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None], sin[:, None, :half]
    rotated = x * cos
    rotated[..., :half] -= x[..., half:] * sin
    rotated[..., half:] += x[..., :half] * sin
    return rotated.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]).to(x.dtype)


# Differentiable functions from pairs of leaves


class _SwiGLU(torch.autograd.Function):
    """Keeps x alone; autograd's own form keeps silu(gate) too and joins the two gradients by a copy.

    ``ctx`` carries whatever forward leaves on it for backward, so it has no type.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Leaf, gradient_leaf: Leaf) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient_leaf = gradient_leaf
        return leaf(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return ctx.gradient_leaf(gradient, x), None, None


class _Rope(torch.autograd.Function):
    """Keeps the tables alone.  No gradient flows into them."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, leaf: Leaf, gradient_leaf: Leaf) -> Heads:
        ctx.save_for_backward(cos, sin)
        ctx.gradient_leaf = gradient_leaf
        return leaf(qkv, cos, sin)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.gradient_leaf(q, k, v, *ctx.saved_tensors), None, None, None, None


def swiglu_of(leaf: Leaf, gradient_leaf: Leaf) -> Callable[[Tensor], Tensor]:
    """A differentiable SwiGLU from a leaf like ``swiglu`` and one like ``swiglu_gradient``."""

    @functools.wraps(leaf)
    def swiglu(x: Tensor) -> Tensor:
        return _SwiGLU.apply(x, leaf, gradient_leaf)

    return swiglu


def rope_of(leaf: Leaf, gradient_leaf: Leaf) -> Callable[[Tensor, Tensor, Tensor], Heads]:
    """A differentiable (qkv, cos, sin) -> heads from a leaf like ``rope`` and one like ``rope_gradient``."""

    @functools.wraps(leaf)
    def rope(qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
        return _Rope.apply(qkv, cos, sin, leaf, gradient_leaf)

    return rope


def split_heads(leaf: Leaf) -> Leaf:
    """A leaf like ``rope`` from one like ``rope_fusable``.  Outside of what is compiled, which would undo the join."""

    @functools.wraps(leaf)
    def call(qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
        groups = qkv.shape[1]
        q, k, v = leaf(qkv, cos, sin).split((groups * (qkv.shape[2] - 2), groups, groups), dim=1)
        return q, k, v

    return call
