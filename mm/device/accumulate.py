"""Matrix products that add the gradient of a weight to its buffer.

The product of bf16 or fp16 rows is summed into an fp32 buffer in fp32: it is never rounded to their dtype or stored on
its own.  A buffer in the dtype of the rows (``--grad-reduce-in-bf16``) is rounded once per product.  This module has
the form without mixed dtypes; the devices' files have the others.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Accumulate = Callable[[Tensor, Tensor, Tensor, bool], None]
"""``accumulate(buffer, gradient, x, overwrites)``: buffer += gradient^T x, summed in fp32 for all dtypes.
If it overwrites: buffer = gradient^T x.

Gradient [rows, output] and x [rows, input] share one dtype: bf16, fp16 or fp32; ``buffer`` [output, input] is fp32 or
of that dtype."""


def plain_accumulate(buffer: Tensor, gradient: Tensor, x: Tensor, overwrites: bool = False) -> None:
    """An ``Accumulate`` that casts the rows to the dtype of the buffer: the CPU multiplies only equal dtypes."""
    gradient, x = gradient.to(buffer.dtype), x.to(buffer.dtype)
    if overwrites:
        torch.mm(gradient.t(), x, out=buffer)
    else:
        buffer.addmm_(gradient.t(), x)
