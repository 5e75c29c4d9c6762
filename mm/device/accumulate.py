"""The gradient of a weight, added to its buffer by the matrix product itself; one form per kind of device.

Into an fp32 buffer, the product of bf16 or fp16 rows is summed in fp32 and never rounded to their dtype, made, kept and
added.  A buffer in the dtype of the rows (``--grad-reduce-in-bf16``) is rounded once a product.  ``kernels.py`` picks
the form of a device.
"""

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from mm.device.attention import torch_npu

Accumulate = Callable[[Tensor, Tensor, Tensor, bool], None]
"""``accumulate(buffer, gradient, x, overwrites)``: buffer += gradient^T x, the sum in fp32 whatever the dtypes are.
Where it overwrites, buffer = gradient^T x, whatever was there.

Gradient [rows, output] and x [rows, input] share one dtype: bf16, fp16 or fp32; ``buffer`` [output, input] is fp32 or
of that dtype."""


def cpu_accumulate(buffer: Tensor, gradient: Tensor, x: Tensor, overwrites: bool = False) -> None:
    """An ``Accumulate``: the rows in the dtype of the buffer, for the CPU has no product of two dtypes."""
    gradient, x = gradient.to(buffer.dtype), x.to(buffer.dtype)
    if overwrites:
        torch.mm(gradient.t(), x, out=buffer)
    else:
        buffer.addmm_(gradient.t(), x)


def cuda_accumulate(buffer: Tensor, gradient: Tensor, x: Tensor, overwrites: bool = False) -> None:
    """An ``Accumulate``: cuBLAS with fp32 output (torch 2.10 or later, where the buffer may have another dtype)."""
    if not len(x):
        if overwrites:
            buffer.zero_()
        return
    if gradient.dtype == buffer.dtype:
        cpu_accumulate(buffer, gradient, x, overwrites)
    elif overwrites:
        torch.mm(gradient.t(), x, out_dtype=buffer.dtype, out=buffer)
    else:
        torch.addmm(buffer, gradient.t(), x, out_dtype=buffer.dtype, out=buffer)


def npu_accumulate(buffer: Tensor, gradient: Tensor, x: Tensor, overwrites: bool = False) -> None:
    """An ``Accumulate``: ATB's product with accumulation, which takes bf16 and fp16 rows and none of them empty.

    Where ``_matmul_add_fault`` finds that it does not work here, the product is rounded to the rows' dtype and added.
    """
    if overwrites:
        buffer.zero_()
    if gradient.dtype == buffer.dtype:
        buffer.addmm_(gradient.t(), x)
    elif not gradient.numel() or not x.numel():
        return
    elif _matmul_add_fault(gradient.dtype, gradient.device) is None:
        torch_npu()._npu_matmul_add_fp32(gradient, x, buffer)
    else:
        buffer.add_(gradient.t() @ x)


@functools.cache
def _matmul_add_fault(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why ``_npu_matmul_add_fp32`` cannot be used for rows of ``dtype``, told once per process; None when it can.

    It wants the ATB library (CANN's nnal package) and an Atlas A2 or A3, and ATB's documentation excludes float16
    while torch_npu's own test uses it, so it is tried: once, on a small product whose result is looked at.
    """
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    buffer = torch.ones(16, 16, device=device)
    try:
        torch_npu()._npu_matmul_add_fp32(ones, ones, buffer)
        found = buffer.unique().tolist()
        fault = None if found == [17.0] else f"its result for 1 + 16 was {found}"
    except (AttributeError, OSError, RuntimeError) as error:
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        warnings.warn(
            f"torch_npu's _npu_matmul_add_fp32 does not work here for {dtype}, so weight gradients are rounded to "
            f"{dtype} before they are added in fp32, and steps are slower. Install CANN's nnal package and source its "
            f"atb/set_env.sh. What it said: {fault}",
            stacklevel=2,
        )
    return fault
