"""SwiGLU, rope and RMSNorm: plain torch, the same compiled, and ours; see benchmarks.kernels."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.bench import Bench, with_backward
from benchmarks.records import OURS
from mm.config.model import LanguageConfig, VisionConfig
from tests.workload import num_patches, num_tokens

PLAIN, COMPILED = "plain torch", "plain torch, compiled"


def pointwise(bench: Bench) -> None:
    """Each operator at the sizes of both towers, forward and backward."""
    towers = (("LLM", num_tokens(bench.sample), bench.model.language, bench.dtype),
              ("ViT", num_patches(bench.sample), bench.model.vision, torch.float32))  # fmt: skip
    for samples in bench.num_samples:
        for name, rows_per_sample, tower, rope_dtype in towers:
            rows = samples * rows_per_sample
            swiglu(bench, f"{name}, {rows} rows", rows, tower.ffn_hidden_size)
            rope(bench, f"{name}, {rows} rows", rows, tower, rope_dtype)
            rms_norm(bench, f"{name}, {rows} rows", rows, tower.hidden_size)


def forms(bench: Bench, plain: Callable[..., Any], ours: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {PLAIN: plain, OURS: ours, **({COMPILED: _compiled(plain)} if bench.compiles else {})}


@cache
def _compiled(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for all shapes, as in training."""
    return torch.compile(plain, dynamic=True)


def plain_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_rope(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split [rows, groups, queries + 2, head_dim], and rotate queries and keys like transformers."""
    q, k, v = qkv.split((qkv.shape[2] - 2, 1, 1), dim=2)
    cos, sin = cos[:, None], sin[:, None]

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

    return rotated(q.flatten(1, 2)), rotated(k.flatten(1, 2)), v.flatten(1, 2)


def plain_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def swiglu(bench: Bench, case: str, rows: int, ffn: int) -> None:
    x, gradient = bench.random(rows, 2 * ffn).requires_grad_(), bench.random(rows, ffn)
    found = {name: with_backward(lambda form=form: form(x), [x], gradient)
             for name, form in forms(bench, plain_swiglu, bench.device.kernels.swiglu).items()}  # fmt: skip
    # at least: read x, write the product; then read x and the product's gradient, write the gradient of x
    bench.compare("pointwise", f"SwiGLU, {case}", found, num_bytes=8 * rows * ffn * x.element_size(),
                  shapes=list(x.shape))  # fmt: skip


def rope(bench: Bench, case: str, rows: int, tower: VisionConfig | LanguageConfig, dtype: torch.dtype) -> None:
    """``dtype``: that of the tables, in which the rotation is computed; fp32 in transformers' ViT."""
    dim, groups = tower.head_dim, tower.num_query_groups
    angles = bench.random(rows, dim // 2, dtype=torch.float32).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    qkv = bench.random(rows, groups, tower.num_attention_heads // groups + 2, dim).requires_grad_()
    shapes = [(rows, tower.num_attention_heads, dim), (rows, groups, dim), (rows, groups, dim)]
    gradients = [bench.random(*shape) for shape in shapes]

    def work(form: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        heads = form(qkv, cos, sin)
        return (*heads, *torch.autograd.grad(heads, [qkv], gradients))

    found = {name: partial(work, form) for name, form in forms(bench, plain_rope, bench.device.kernels.rope).items()}
    # at least: read and write all of qkv, forward and backward
    bench.compare("pointwise", f"split and rope, {case}", found, shapes=list(qkv.shape),
                  num_bytes=4 * qkv.nbytes + 4 * cos.nbytes)  # fmt: skip


def rms_norm(bench: Bench, case: str, rows: int, hidden: int) -> None:
    x, weight = bench.random(rows, hidden).requires_grad_(), bench.random(hidden).requires_grad_()
    gradient = bench.random(rows, hidden)
    found = {name: with_backward(lambda form=form: form(x, weight, 1e-6), [x, weight], gradient)
             for name, form in forms(bench, plain_rms_norm, bench.device.kernels.rms_norm).items()}  # fmt: skip
    bench.compare("pointwise", f"RMSNorm, {case}", found, num_bytes=5 * x.nbytes, shapes=list(x.shape))
