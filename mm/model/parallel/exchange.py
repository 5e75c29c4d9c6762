"""Rows and heads that context-parallel ranks exchange, as autograd sees it.

``mm.parallel.context`` decides which rank holds which rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm.device.attention import Kernel, Segments
from mm.model.parallel.rows import Permutation
from mm.parallel.context import all_to_all

Exchanged = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Exchange:
    """Every row of each rank goes to one rank of ``group``, which may be itself."""

    group: dist.ProcessGroup
    send: Permutation
    """Puts the rows here in the order of their target ranks."""
    sent: tuple[int, ...]
    """Rows for each rank."""
    received: tuple[int, ...]
    """Rows from each rank."""
    receive: Permutation
    """Puts the received rows, which are in rank order, in the order needed here."""

    def reversed(self) -> "Exchange":
        return Exchange(self.group, self.receive.reversed(), self.received, self.sent, self.send.reversed())

    def to_device(self, copy: Callable[[Tensor], Tensor]) -> "Exchange":
        """``copy`` takes a host tensor to the device (``Device.copy``)."""
        return replace(self, send=self.send.to_device(copy), receive=self.receive.to_device(copy))

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows here, width] -> [rows needed here, width].  Collective in forward and backward: if one rank's rows
        require gradients, all ranks' must."""
        return _Moved.apply(rows, self.run, self.reversed().run)

    def run(self, rows: Tensor) -> Tensor:
        """The same without autograd."""
        arrived = all_to_all(rows.index_select(0, self.send.index), self.sent, self.received, self.group)
        return arrived.index_select(0, self.receive.index)


@dataclass(frozen=True)
class Ulysses:
    """Attention of all tokens for a part of the heads (DeepSpeed-Ulysses, arXiv:2309.14509)."""

    group: dist.ProcessGroup
    num_rows: tuple[int, ...]
    """Tokens of each rank; joined in rank order they are the packed row."""

    def attend(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
        """Like ``kernel``, for this rank's tokens.  With fewer key heads than ranks, each goes to all ranks that need
        it."""
        size = len(self.num_rows)
        copies = max(size // k.shape[1], 1)
        if copies > 1:
            k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
        heads = (q.shape[1] // size, k.shape[1] // size, v.shape[1] // size)
        by_rank = [one.unflatten(1, (size, count)) for one, count in zip((q, k, v), heads, strict=True)]
        q, k, v = _Moved.apply(torch.cat(by_rank, dim=2), self.to_heads, self.to_rows).split(heads, dim=1)
        return _Moved.apply(kernel(q, k, v, segments, causal), self.to_rows, self.to_heads).flatten(1, 2)

    def to_heads(self, rows: Tensor) -> Tensor:
        """[tokens here, ranks, heads of each, head_dim] -> [all tokens, heads here, head_dim]"""
        size, here = len(self.num_rows), rows.shape[0]
        return all_to_all(rows.transpose(0, 1).flatten(0, 1), [here] * size, self.num_rows, self.group)

    def to_rows(self, heads: Tensor) -> Tensor:
        """The inverse of ``to_heads``."""
        size, here = len(self.num_rows), self.num_rows[self.group.rank()]
        return all_to_all(heads, self.num_rows, [here] * size, self.group).unflatten(0, (size, here)).transpose(0, 1)


class _Moved(torch.autograd.Function):
    """Elements that move between ranks by ``there``; their gradients go ``back``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Exchanged, back: Exchanged) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None
