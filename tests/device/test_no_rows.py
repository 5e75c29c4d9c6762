"""Operators of every kind of device on tensors without rows: a context-parallel rank may hold none of a microbatch."""

import pytest
import torch

from mm.device.kernels import Kernels
from tests.device.test_pointwise import LANGUAGE, VISION, fused_projection, tables, unfused, with_gradient
from tests.devices import kernels_of

WIDTH = 24


@pytest.fixture(params=["cpu", "cuda", "npu"])
def kernels(request: pytest.FixtureRequest, torch_npu: object) -> Kernels:
    return kernels_of(request.param, unfused)


def test_rms_norm(kernels: Kernels) -> None:
    weight = torch.ones(WIDTH, requires_grad=True)
    x = torch.empty(0, WIDTH, requires_grad=True)
    out = kernels.rms_norm(x, weight, 1e-6)
    of_x, of_weight = torch.autograd.grad(out.sum(), (x, weight))
    assert out.shape == of_x.shape == (0, WIDTH) and torch.equal(of_weight, torch.zeros(WIDTH))


def test_swiglu(kernels: Kernels) -> None:
    out, gradient = with_gradient(kernels.swiglu, torch.empty(0, WIDTH))
    assert out.shape == (0, WIDTH // 2) and gradient.shape == (0, WIDTH)


@pytest.mark.parametrize("shape", [LANGUAGE, VISION])
def test_rope(kernels: Kernels, shape: tuple[int, int, int]) -> None:
    groups, heads_per_group, head_dim = shape
    qkv = fused_projection(shape, 0)
    q, k, v, gradient = with_gradient(kernels.rope, qkv, *tables(head_dim, 0))
    assert q.shape == (0, groups * heads_per_group, head_dim) and k.shape == v.shape == (0, groups, head_dim)
    assert gradient.shape == qkv.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_weight(kernels: Kernels, dtype: torch.dtype) -> None:
    buffer = torch.arange(6.0).view(2, 3)
    kernels.accumulate(buffer, torch.empty(0, 2, dtype=dtype), torch.empty(0, 3, dtype=dtype), False)
    assert torch.equal(buffer, torch.arange(6.0).view(2, 3))
