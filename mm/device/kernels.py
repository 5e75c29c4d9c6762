"""The operators that differ between kinds of device, as plain functions: attention, norm, SwiGLU, weight gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mm.device.accumulate import Accumulate, cpu_accumulate, cuda_accumulate, npu_accumulate
from mm.device.attention import Kernel, cpu_attention, cuda_attention, npu_attention, torch_npu


@dataclass(frozen=True)
class Kernels:
    """One operator of each sort."""

    attention: Kernel
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [..., n], weight [n], epsilon): statistics in fp32."""
    swiglu: Callable[[Tensor], Tensor]
    """x [..., 2n] = [gate; up] -> silu(gate) * up [..., n]."""
    accumulate: Accumulate


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up of x = [gate; up], keeping x alone and writing both gradients into one buffer.

    Autograd's own form keeps silu(gate) too and joins the two gradients by a copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        x_gradient = torch.empty_like(x)
        gate_gradient, up_gradient = x_gradient.chunk(2, dim=-1)
        torch.mul(F.silu(gate), gradient, out=up_gradient)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=gate_gradient)
        return x_gradient


def npu_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return torch_npu().npu_rms_norm(x, weight, epsilon=epsilon)[0]


def npu_swiglu(x: Tensor) -> Tensor:
    return torch_npu().npu_swiglu(x, dim=-1)


KERNELS = {
    "cpu": Kernels(cpu_attention, rms_norm, SwiGLU.apply, cpu_accumulate),
    "cuda": Kernels(cuda_attention, rms_norm, SwiGLU.apply, cuda_accumulate),
    "npu": Kernels(npu_attention, npu_rms_norm, npu_swiglu, npu_accumulate),
}
"""By kind of device."""
