"""Rows cut over the tensor-parallel ranks: what each rank holds between two linear layers under sequence parallelism.

The number of rows need not be a multiple of the ranks': the last pieces are smaller, or empty.  Buffers of a collective
are padded to equal size.
"""

from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def piece_of(num_rows: int, unit: int, rank: int, num_ranks: int) -> slice:
    """One rank's rows: equally many on all ranks but the last ones.  Each ``unit`` consecutive rows stay together."""
    assert num_rows % unit == 0, (num_rows, unit)
    size = -(-num_rows // unit // num_ranks) * unit
    return slice(min(rank * size, num_rows), min((rank + 1) * size, num_rows))


@dataclass(frozen=True)
class Pieces:
    """A division of ``num_rows`` rows over ``group``."""

    num_rows: int
    group: dist.ProcessGroup
    unit: int = 1

    @property
    def here(self) -> slice:
        """The rows of this rank."""
        return piece_of(self.num_rows, self.unit, self.group.rank(), self.group.size())

    @property
    def padded_rows(self) -> int:
        """Rows of the longest piece: those of the first rank."""
        return piece_of(self.num_rows, self.unit, 0, self.group.size()).stop

    def gather(self, piece: Tensor) -> Tensor:
        """[rows here, width] of every rank -> [num_rows, width] on all."""
        _, whole = self._gather(piece, is_async=False)
        return whole

    def start_gathering(self, piece: Tensor) -> tuple[dist.Work, Tensor]:
        """Start ``gather``; the rows are valid once the work is done."""
        work, whole = self._gather(piece, is_async=True)
        assert work is not None, "torch returns one with async_op"
        return work, whole

    def _gather(self, piece: Tensor, is_async: bool) -> tuple[dist.Work | None, Tensor]:
        whole = piece.new_empty(self.group.size() * self.padded_rows, piece.shape[1])
        padded = _padded(piece, self.padded_rows)
        work = dist.all_gather_into_tensor(whole, padded, group=self.group, async_op=is_async)
        return work, whole[: self.num_rows]  # padding is at the end only: all pieces before a smaller one are full

    def start_reducing(self, whole: Tensor) -> tuple[dist.Work, Tensor]:
        """[num_rows, width] of every rank -> this rank's rows of the sum, valid once the work is done."""
        piece = whole.new_empty(self.padded_rows, whole.shape[1])
        padded = _padded(whole, self.group.size() * self.padded_rows)
        work = dist.reduce_scatter_tensor(piece, padded, group=self.group, async_op=True)
        assert work is not None, "torch returns one with async_op"
        here = self.here
        return work, piece[: here.stop - here.start]


def _padded(rows: Tensor, num_rows: int) -> Tensor:
    return rows.contiguous() if len(rows) == num_rows else F.pad(rows, (0, 0, 0, num_rows - len(rows)))
