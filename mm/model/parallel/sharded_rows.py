"""Sequence parallelism in the model: gather rows from the tensor-parallel ranks' pieces, and reduce-scatter them back.

Between two linear layers each rank holds a piece; their products need all rows.  ``mm.parallel.row_shards`` cuts them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm.model.parallel.rows import Permutation
from mm.parallel.row_shards import Pieces


@dataclass(frozen=True, eq=False)
class CutRows:
    """Rows of which each tensor-parallel rank holds a piece, and the order in which a layer needs all of them."""

    pieces: Pieces
    order: Permutation | None = None
    """None: the order of the pieces."""

    @property
    def unordered(self) -> "CutRows":
        """For a layer that does not depend on the order of rows."""
        return CutRows(self.pieces)

    def gather(self, piece: Tensor) -> Tensor:
        """The piece of every rank -> all rows, in order.  Autograd does not see it."""
        whole = self.pieces.gather(piece)
        return self._ordered(whole)

    def start_gathering(self, piece: Tensor) -> Callable[[], Tensor]:
        """Start the gather; calling the result waits and returns all rows, in order."""
        work, whole = self.pieces.start_gathering(piece)

        def rows() -> Tensor:
            work.wait()
            return self._ordered(whole)

        return rows

    def _ordered(self, whole: Tensor) -> Tensor:
        return whole if self.order is None else whole.index_select(0, self.order.index)

    def start_reducing(self, whole: Tensor) -> tuple[dist.Work, Tensor]:
        """All rows, in order, a summand on each rank -> this rank's piece of the sum, valid once the work is done."""
        return self.pieces.start_reducing(whole if self.order is None else whole.index_select(0, self.order.inverse))

    def reduce(self, whole: Tensor) -> Tensor:
        work, piece = self.start_reducing(whole)
        work.wait()
        return piece


def gather_rows(piece: Tensor, cut: CutRows, *, sums_gradients: bool) -> Tensor:
    """All rows on every rank.

    ``sums_gradients``: the ranks use the rows differently, so their gradient is the sum over ranks.  Otherwise all
    ranks compute the same from them, and each already has the whole gradient.
    """
    return _Gather.apply(piece, cut, sums_gradients)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, cut: CutRows, sums_gradients: bool) -> Tensor:
        ctx.cut, ctx.sums_gradients = cut, sums_gradients
        return cut.gather(piece)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cut = ctx.cut
        if ctx.sums_gradients:
            return cut.reduce(gradient), None, None
        whole = gradient if cut.order is None else gradient.index_select(0, cut.order.inverse)
        return whole[cut.pieces.here], None, None


def reduce_rows(whole: Tensor, cut: CutRows) -> Tensor:
    """All rows, with a summand on each rank -> this rank's piece of the sum."""
    return _Reduce.apply(whole, cut)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, cut: CutRows) -> Tensor:
        ctx.cut = cut
        return cut.reduce(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.cut.gather(gradient), None
