"""The gradient of a weight, added to its buffer by the matrix product itself.

Into an fp32 buffer, the product of bf16 or fp16 rows is summed in fp32 and never rounded to their dtype, made, kept and
added.  A buffer in the dtype of the rows (``--grad-reduce-in-bf16``) is rounded once a product.  Here is the form that
needs no product of two dtypes; the others are in the files of their devices.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Accumulate = Callable[[Tensor, Tensor, Tensor, bool], None]
"""``accumulate(buffer, gradient, x, overwrites)``: buffer += gradient^T x, the sum in fp32 whatever the dtypes are.
Where it overwrites, buffer = gradient^T x, whatever was there.

Gradient [rows, output] and x [rows, input] share one dtype: bf16, fp16 or fp32; ``buffer`` [output, input] is fp32 or
of that dtype."""


def plain_accumulate(buffer: Tensor, gradient: Tensor, x: Tensor, overwrites: bool = False) -> None:
    """An ``Accumulate``: the rows in the dtype of the buffer, so the product is of one dtype, as the CPU needs it."""
    gradient, x = gradient.to(buffer.dtype), x.to(buffer.dtype)
    if overwrites:
        torch.mm(gradient.t(), x, out=buffer)
    else:
        buffer.addmm_(gradient.t(), x)
