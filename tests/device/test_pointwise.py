"""SwiGLU and rope: every set of kernel functions against the others.  What is compiled: test_compiled.py."""

import math

import pytest
import torch
import torch.nn.functional as F

from mm.device.kernels import Kernels
from tests.devices import kernels_of

LANGUAGE, VISION = (2, 3, 32), (4, 1, 16)
"""Groups, heads per group, size of a head: grouped queries, and a group for each head."""


dtypes = pytest.mark.parametrize(
    ("dtype", "table_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
"""Dtypes of the model and the tables, which are never narrower."""


def fused_projection(shape: tuple[int, int, int], rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    groups, heads_per_group, head_dim = shape
    return torch.randn(rows, groups, heads_per_group + 2, head_dim, dtype=dtype)


def tables(head_dim: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(rows, head_dim // 2).repeat(1, 2)
    return angles.cos(), angles.sin()


def with_gradient(function, x: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """What ``function`` makes of x, and the gradient of x for a fixed upstream gradient."""
    x = x.detach().requires_grad_()
    return _with_gradients(function(x, *others), x)


def with_bias_gradient(function, x: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """The same of a product x with a bias in it, and the gradient of the bias."""
    x = x.detach().requires_grad_()
    bias = torch.zeros(math.prod(x.shape[1:]), dtype=x.dtype, device=x.device, requires_grad=True)
    return _with_gradients(function(x, *others, bias), x, bias)


def _with_gradients(out, *leaves: torch.Tensor) -> list[torch.Tensor]:
    outputs = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(part.shape, generator=generator).to(part) for part in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def unfused(function):
    return function


@pytest.mark.parametrize("shape", [LANGUAGE, VISION])
@dtypes
def test_both_sets_of_functions_are_equal_to_the_bit_when_eager(shape, dtype, table_dtype) -> None:
    eager, fusable = kernels_of("cpu"), kernels_of("cuda", unfused)
    x = fused_projection(shape, 7, dtype), *(table.to(table_dtype) for table in tables(shape[2], 7))
    for mine, theirs in zip(with_gradient(fusable.rope, *x), with_gradient(eager.rope, *x), strict=True):
        assert mine.dtype == dtype and torch.equal(mine, theirs)
    x = torch.randn(7, 24, dtype=dtype)
    for mine, theirs in zip(with_gradient(fusable.swiglu, x), with_gradient(eager.swiglu, x), strict=True):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0)


@pytest.mark.parametrize("rows", [0, 1, 7, 64, 130])
@pytest.mark.parametrize("kind", ["cuda", "npu"])
@dtypes
def test_the_gradient_of_a_bias_is_the_sum_of_the_rows(torch_npu, kind: str, rows: int, dtype, table_dtype) -> None:
    """Fused functions sum rows before they are rounded: nearer to the sum in fp32 than the sum of rounded rows."""
    cpu, kernels = kernels_of("cpu"), kernels_of(kind, unfused)
    angles = (table.to(table_dtype) for table in tables(LANGUAGE[2], rows))
    projection, gate_up = fused_projection(LANGUAGE, rows, dtype), torch.randn(rows, 24, dtype=dtype)
    for operator, x in (("rope", (projection, *angles)), ("swiglu", (gate_up,))):
        *found, bias = with_bias_gradient(getattr(kernels, operator), *x)
        *expected, _ = with_bias_gradient(getattr(cpu, operator), *x)
        *_, gradient, exact = with_bias_gradient(getattr(cpu, operator), *(one.float() for one in x))
        atol, rtol = (1e-5, 1e-6) if dtype is torch.float32 else (0.1, 0.02)  # measured 1.9e-6; 0.05
        assert torch.equal(gradient.flatten(1).sum(0), exact) and bias.dtype == dtype
        torch.testing.assert_close(bias.float(), exact, atol=atol, rtol=rtol)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=atol, rtol=rtol)


def test_swiglu_equals_autograds() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    x = torch.randn(5, 24)
    for mine, theirs in zip(with_gradient(kernels_of("cpu").swiglu, x), with_gradient(plain, x), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("shape", [LANGUAGE, VISION])
@pytest.mark.parametrize("kernels", ["cuda", "npu"])
def test_heads_of_an_accelerator_keep_the_fused_projection_from_living_on(torch_npu, shape, kernels: str) -> None:
    qkv = fused_projection(shape, 7)
    heads = kernels_of(kernels, unfused).rope(qkv, *tables(shape[2], 7))
    assert all(head.untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr() for head in heads)
    kept = {head.untyped_storage().data_ptr(): head.untyped_storage().nbytes() for head in heads}
    assert sum(kept.values()) == qkv.untyped_storage().nbytes()


@pytest.mark.parametrize("shape", [LANGUAGE, VISION])
@dtypes
def test_rope_of_the_npu(torch_npu, shape, dtype, table_dtype) -> None:
    x = fused_projection(shape, 7, dtype), *(table.to(table_dtype) for table in tables(shape[2], 7))
    ours, expected = (with_gradient(kernels_of(kind).rope, *x) for kind in ("npu", "cpu"))
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.dtype == dtype and torch.equal(mine, theirs)  # the stand-in rounds as transformers does


def test_rope_keeps_its_tables_alone() -> None:
    kept = []
    qkv, (cos, sin) = fused_projection(LANGUAGE, 7).requires_grad_(), tables(32, 7)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        kernels_of("cpu").rope(qkv, cos, sin)
    assert [tensor.data_ptr() for tensor in kept] == [cos.data_ptr(), sin.data_ptr()]


# Without rows: a context-parallel rank may hold none of a microbatch

WIDTH = 24


@pytest.fixture(params=["cpu", "cuda", "npu"])
def kernels(request: pytest.FixtureRequest, torch_npu: object) -> Kernels:
    return kernels_of(request.param, unfused)


def test_rms_norm_without_rows(kernels: Kernels) -> None:
    weight = torch.ones(WIDTH, requires_grad=True)
    x = torch.empty(0, WIDTH, requires_grad=True)
    out = kernels.rms_norm(x, weight, 1e-6)
    of_x, of_weight = torch.autograd.grad(out.sum(), (x, weight))
    assert out.shape == of_x.shape == (0, WIDTH) and torch.equal(of_weight, torch.zeros(WIDTH))


def test_swiglu_without_rows(kernels: Kernels) -> None:
    out, gradient = with_gradient(kernels.swiglu, torch.empty(0, WIDTH))
    assert out.shape == (0, WIDTH // 2) and gradient.shape == (0, WIDTH)


@pytest.mark.parametrize("shape", [LANGUAGE, VISION])
def test_rope_without_rows(kernels: Kernels, shape: tuple[int, int, int]) -> None:
    groups, heads_per_group, head_dim = shape
    qkv = fused_projection(shape, 0)
    q, k, v, gradient = with_gradient(kernels.rope, qkv, *tables(head_dim, 0))
    assert q.shape == (0, groups * heads_per_group, head_dim) and k.shape == v.shape == (0, groups, head_dim)
    assert gradient.shape == qkv.shape
