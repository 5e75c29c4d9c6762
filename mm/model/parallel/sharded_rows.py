"""Sequence parallelism in a layer: gather the rows that tensor-parallel ranks hold shards of, and reduce-scatter them.

Between two linear layers each rank holds a shard (``mm.parallel.context.RowShards``); their products need all rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm.model.parallel.rows import Permutation
from mm.parallel.context import RowShards


@dataclass(frozen=True, eq=False)
class ShardedRows:
    """Rows of which each tensor-parallel rank holds a shard, and the order in which a layer needs all of them."""

    shards: RowShards
    order: Permutation | None = None
    """None: the order of the shards."""

    @property
    def unordered(self) -> "ShardedRows":
        """For a layer that does not depend on the order of rows."""
        return ShardedRows(self.shards)

    def gather(self, shard: Tensor) -> Tensor:
        """The shard of every rank -> all rows, in order.  Autograd does not see it."""
        whole = self.shards.gather(shard)
        return self._ordered(whole)

    def start_gathering(self, shard: Tensor) -> Callable[[], Tensor]:
        """Start the gather; calling the result waits and returns all rows, in order."""
        work, whole = self.shards.start_gathering(shard)

        def rows() -> Tensor:
            work.wait()
            return self._ordered(whole)

        return rows

    def _ordered(self, whole: Tensor) -> Tensor:
        return whole if self.order is None else whole.index_select(0, self.order.index)

    def start_reducing(self, whole: Tensor) -> tuple[dist.Work, Tensor]:
        """All rows, in order, a summand on each rank -> this rank's shard of the sum, valid once the work is done."""
        return self.shards.start_reducing(whole if self.order is None else whole.index_select(0, self.order.inverse))

    def reduce(self, whole: Tensor) -> Tensor:
        work, shard = self.start_reducing(whole)
        work.wait()
        return shard


def gather_rows(shard: Tensor, sharded: ShardedRows, *, sums_gradients: bool) -> Tensor:
    """All rows on every rank.

    ``sums_gradients``: the ranks use the rows differently, so their gradient is the sum over ranks.  Otherwise all
    ranks compute the same from them, and each already has the whole gradient.
    """
    return _Gather.apply(shard, sharded, sums_gradients)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, sharded: ShardedRows, sums_gradients: bool) -> Tensor:
        ctx.sharded, ctx.sums_gradients = sharded, sums_gradients
        return sharded.gather(shard)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        sharded = ctx.sharded
        if ctx.sums_gradients:
            return sharded.reduce(gradient), None, None
        whole = gradient if sharded.order is None else gradient.index_select(0, sharded.order.inverse)
        return whole[sharded.shards.here], None, None


def reduce_rows(whole: Tensor, sharded: ShardedRows) -> Tensor:
    """All rows, with a summand on each rank -> this rank's shard of the sum."""
    return _Reduce.apply(whole, sharded)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, sharded: ShardedRows) -> Tensor:
        ctx.sharded = sharded
        return sharded.reduce(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.sharded.gather(gradient), None
