"""Hashes in place of random numbers: the same wherever, and in whatever order, they are computed."""

import torch
from torch import Tensor

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
    """fp32 [n] ``values`` in bf16 by stochastic rounding: up or down, so that the mean is right.

    A hash of the fp32 bits of ``salts`` [n] and of ``step`` [1] decides, so equal arguments have equal results, on
    every device.  Values that bf16 can represent are kept.  A leaf, as in ``mm.device.pointwise``, that can be compiled
    to one kernel.
    """
    noise = mixed(_bits_of(salts) ^ mixed(_bits_of(step))) >> (32 - _DROPPED_BITS)
    bits = (values.view(torch.int32).to(torch.int64) + noise) >> _DROPPED_BITS << _DROPPED_BITS
    rounded = bits.to(torch.int32).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _bits_of(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int32).to(torch.int64) & BITS
