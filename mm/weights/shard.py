"""How a rank's shard of a weight lies in memory, and which rank reads it.  Pure: opens no file.

Files have the shape of ``local_shape``: an ffn of 3420 columns is 3420 wide, or 855 on each of 4 ranks.  Rows of 855
16-bit numbers cannot be loaded 16 bytes at a time, so in memory each rank pads its 855 columns to 864.  The padding is
zero, gets zero gradients and stays zero.

An fp32 weight may lie in memory as two halves of 16 bits: the bf16 weight that the model computes with, and the
remainder, what rounding left out.  Together they are the fp32 number to the bit:

    fp32      0x3F80_9000 = 1.00439453125
    weight    0x3F81      = 1.0078125     rounded up, because 0x9000 is more than half of 0x10000
    remainder    -0x7000                  0x3F81_0000 - 0x7000 = 0x3F80_9000

Remainders of 16 bits reach from -0x8000 to 0x7FFF, so a number exactly between two bf16 numbers is rounded away from
zero.  torch rounds such a number, one of 65,536, to the even neighbour, which is as near.  NaN becomes infinity;
either stops a run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

import torch
import torch.nn.functional as F
from torch import Tensor

from mm.weights.fuse import local_shape, num_stacked_blocks
from mm.weights.table import Weight

FFN_MULTIPLE = 16
"""A rank's ffn columns in memory are a multiple of this: TMA and 16-byte loads on CUDA need rows of 8 numbers of 16
bits or 16 of 8 bits, and Ascend's cube unit multiplies blocks of 16 x 16."""


def memory_ffn(ffn: int, tp_size: int) -> int:
    """Columns of an ffn in memory, on all ``tp_size`` ranks together: 3420 becomes 3424, at TP 4 and 8 3456."""
    block = FFN_MULTIPLE * tp_size
    return -(-ffn // block) * block


def memory_shape(weight: Weight, tp_size: int) -> tuple[int, ...]:
    """Shape of one TP rank's parameter; the same on every rank."""
    return MemoryLayout.of(weight, tp_size).shape


@dataclass(frozen=True)
class MemoryLayout:
    """Where a shard's elements lie in its parameter: in order, with zeros after every ``row`` of them.

    A 2x3 shard padded to 2x4 (``row`` 3, ``padded_row`` 4)::

        a b c     a b c 0     real_range(2, 6) = (2, 5)
        d e f     d e f 0     unpad([c 0 d e], start=2) = [c d e];  pad([c d e], 2, 6) = [c 0 d e]
    """

    shape: tuple[int, ...]
    file_shape: tuple[int, ...]
    """Shape of the shard in files."""
    row: int
    """Elements of the shard that lie together."""
    padded_row: int
    """The same number with the zeros that follow them."""

    @classmethod
    def of(cls, weight: Weight, tp_size: int) -> "MemoryLayout":
        """The layout on each of ``tp_size`` ranks."""
        file_shape = local_shape(weight, tp_size)
        if not weight.pads or weight.tp_dim is None:
            return cls(file_shape, file_shape, math.prod(file_shape), math.prod(file_shape))
        dim, blocks = weight.tp_dim, num_stacked_blocks(weight)
        width, inner = file_shape[dim] // blocks, math.prod(file_shape[dim + 1 :])
        padded = memory_ffn(width, tp_size=1)  # each rank's own columns
        shape = (*file_shape[:dim], blocks * padded, *file_shape[dim + 1 :])
        return cls(shape, file_shape, width * inner, padded * inner)

    def real_range(self, start: int, stop: int) -> tuple[int, int]:
        """The range of the flattened shard held by elements ``start`` to ``stop`` of the flattened parameter."""
        first, last = (index // self.padded_row * self.row + min(index % self.padded_row, self.row)
                       for index in (start, stop))
        return first, last

    def unpad(self, values: Tensor, start: int = 0) -> Tensor:
        """Remove the padding from ``values``, a flat range of the parameter that begins at element ``start``."""
        if self.row == self.padded_row:
            return values
        first, last = self.real_range(start, start + len(values))
        whole = F.pad(values, (start % self.padded_row, -(start + len(values)) % self.padded_row))
        flat = whole.view(-1, self.padded_row)[:, : self.row].reshape(-1)
        before = first - start // self.padded_row * self.row
        return flat[before : before + last - first]

    def pad(self, values: Tensor, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened parameter, from ``values``, their flat ``real_range``."""
        if self.row == self.padded_row:
            return values
        first_row, last_row = start // self.padded_row, -(-stop // self.padded_row)
        first, last = self.real_range(start, stop)
        whole = F.pad(values, (first - first_row * self.row, last_row * self.row - last))
        flat = F.pad(whole.view(-1, self.row), (0, self.padded_row - self.row)).view(-1)
        return flat[start - first_row * self.padded_row : stop - first_row * self.padded_row]

    def unpad_whole(self, parameter: Tensor) -> Tensor:
        """The shard as files hold it."""
        return self.unpad(parameter.reshape(-1)).reshape(self.file_shape)

    def pad_whole(self, shard: Tensor) -> Tensor:
        """The parameter that holds ``shard``."""
        return self.pad(shard.reshape(-1), 0, math.prod(self.shape)).reshape(self.shape)


REMAINDER = "remainder"
"""Its name among the states of a weight, in memory and in checkpoints."""
_HALF = 0x8000
_LOW, _HIGH = 0, 1
"""The 16-bit halves of an fp32 number in memory: every device that torch runs on stores the low one first."""


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 [n] numbers of a bf16 [n] ``weight`` and its int16 [n] ``remainder``, on any device, in new memory."""
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


def readers(num_bytes: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """The rank that reads each weight, chosen so that all ranks read about as much; every rank gets the same answer.

    ``num_bytes`` is the size of each weight.  The rule is greedy: the largest weight goes first, and each goes to the
    rank that reads least so far.  So the loads of two ranks differ by no more than the largest weight.  Ties go to
    ranks that are far apart, because neighbours share a host and its path to the disk.
    """
    # Reversing the bits of the ranks gives such an order: 0, 4, 2, 6, 1, 5, 3, 7.  The sorted list is already a heap.
    bits = (num_ranks - 1).bit_length()
    apart = sorted(range(num_ranks), key=lambda rank: f"{rank:0{bits}b}"[::-1])
    loads = [(0, place) for place in range(num_ranks)]
    chosen = [0] * len(num_bytes)
    for number in sorted(range(len(num_bytes)), key=lambda number: -num_bytes[number]):
        load, place = loads[0]
        chosen[number] = apart[place]
        heapreplace(loads, (load + num_bytes[number], place))
    return tuple(chosen)
