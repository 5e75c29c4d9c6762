"""fp32 weights as two halves of 16 bits: the bf16 weight that the model computes with, and the remainder.

The remainder is what the weight's rounding left out, so together they are the fp32 number to the bit:

    fp32      0x3F80_9000 = 1.00439453125
    weight    0x3F81      = 1.0078125     rounded up, because 0x9000 is more than half of 0x10000
    remainder    -0x7000                  0x3F81_0000 - 0x7000 = 0x3F80_9000

Remainders of 16 bits reach from -0x8000 to 0x7FFF, so a number exactly between two bf16 numbers is rounded away from
zero.  torch rounds such a number, one of 65,536, to the even neighbour, which is as near.  NaN becomes infinity;
either stops a run.

Both functions take and fill flat tensors on any device.  No cast narrows an integer, because some devices saturate.
"""

import math

import torch
from torch import Tensor

REMAINDER = "remainder"
"""Its name among the states of a weight, in memory and in checkpoints."""
_HALF = 0x8000
_LOW, _HIGH = 0, 1
"""The 16-bit halves of an fp32 number in memory: every device that torch runs on stores the low one first."""


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 [n] numbers of a bf16 [n] ``weight`` and its int16 [n] ``remainder``, in new memory."""
    bits = weight.detach().view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(remainder).view(torch.float32)


def split(numbers: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Fill ``weight`` and ``remainder`` so that ``joined`` returns the fp32 [n] ``numbers``, infinity for NaN."""
    bits = numbers.detach().contiguous().nan_to_num(math.inf, math.inf, -math.inf).view(torch.int32)
    remainder.copy_(_halves(bits, _LOW))
    weight.detach().view(torch.int16).copy_(_halves(bits + _HALF, _HIGH))


def _halves(bits: Tensor, which: int) -> Tensor:
    """int16 [n]: one half of each of the int32 [n] ``bits``."""
    return bits.view(torch.int16).view(-1, 2)[:, which]
