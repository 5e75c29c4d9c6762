"""Context parallelism inside a layer, as autograd sees it: exchanges of rows and heads, and ring attention
(arXiv:2310.01889).  ``mm.parallel.context`` decides which rank holds which rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm.device.attention import Kernel, Pairs, PartialAttention, PartialOutput, Segments
from mm.model.parallel.rows import Permutation
from mm.parallel.context import Passing, all_to_all, zigzag_lengths

Exchanged = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Exchange:
    """Every row of each rank goes to one rank of ``group``, which may be itself."""

    group: dist.ProcessGroup
    send: Permutation
    """Puts the rows here in the order of their target ranks."""
    sent: tuple[int, ...]
    received: tuple[int, ...]
    receive: Permutation
    """Puts the received rows, which are in rank order, in the order needed here."""

    def reversed(self) -> "Exchange":
        return Exchange(self.group, self.receive.reversed(), self.received, self.sent, self.send.reversed())

    def to_device(self, copy: Callable[[Tensor], Tensor]) -> "Exchange":
        """``copy``: ``Device.copy``."""
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


@dataclass(frozen=True)
class RingStep:
    """Which of this rank's queries attend to which of one rank's keys."""

    queries: Tensor | None
    """int64: indices; None means all.  ``keys`` likewise."""
    keys: Tensor | None
    pairs: Pairs

    @classmethod
    def of(
        cls, segment_lengths: Sequence[int], rank: int, key_rank: int, num_ranks: int, copy: Callable[[Tensor], Tensor]
    ) -> "RingStep | None":
        """Queries of ``rank`` and keys of ``key_rank``; None if no query sees any key.

        Each rank holds an early and a late piece of a segment; with three ranks, 0 1 2 2 1 0.  Seen from rank 1::

            keys of 0 (lower)    [0] 1  2  2  1  0     early and late queries see the early piece of these keys only
            keys of 2 (higher)    0  1 [2][2](1) 0     only late queries (in parentheses) see both pieces
            keys of 1 (itself)    0 [1] 2  2 [1] 0     all queries and keys, with a causal mask
        """
        queries: list[range] = []
        keys: list[range] = []
        q_start = k_start = 0
        for length in segment_lengths:
            held = zigzag_lengths(length, num_ranks)
            (q_first, q_last), (k_first, k_last) = held[rank], held[key_rank]
            first_query = q_start + q_first if key_rank > rank else q_start
            last_key = k_start + k_first if key_rank < rank else k_start + k_first + k_last
            if first_query < q_start + q_first + q_last and k_start < last_key:
                queries.append(range(first_query, q_start + q_first + q_last))
                keys.append(range(k_start, last_key))
            q_start, k_start = q_start + q_first + q_last, k_start + k_first + k_last
        if not queries:
            return None
        q_segments, k_segments = (Segments.build(map(len, one), copy) for one in (queries, keys))
        pairs = Pairs(q_segments, k_segments, causal=key_rank == rank)
        return cls(_index(queries, q_start, copy), _index(keys, k_start, copy), pairs)


def _index(ranges: Sequence[range], num_rows: int, copy: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Rows of ``ranges`` as an index; None if they are all rows."""
    if sum(map(len, ranges)) == num_rows:
        return None
    return copy(torch.cat([torch.arange(one.start, one.stop) for one in ranges]))


@dataclass(frozen=True)
class Ring:
    """Causal attention of one rank for one microbatch, by tokens divided in the zigzag of ``mm.parallel.context``.

    The rank attends with its own queries to the keys that pass by, first its own, then the previous rank's, and so on,
    and combines the partial results by their log-sum-exp.  Every rank has equal work at every step, and only its own
    keys need a mask.
    """

    group: dist.ProcessGroup
    num_rows: tuple[int, ...]
    """Tokens of each rank."""
    steps: tuple[RingStep | None, ...]
    partial: PartialAttention

    @classmethod
    def of(
        cls, segment_lengths: Sequence[int], num_rows: tuple[int, ...], group: dist.ProcessGroup,
        partial: PartialAttention, copy: Callable[[Tensor], Tensor],
    ) -> "Ring":
        """``copy``: ``Device.copy``."""
        rank, size = group.rank(), group.size()
        key_ranks = [(rank - number) % size for number in range(size)]
        steps = tuple(RingStep.of(segment_lengths, rank, key_rank, size, copy) for key_rank in key_ranks)
        return cls(group, num_rows, steps, partial)

    def attend(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
        """Like ``kernel``, for this rank's tokens; ``kernel`` itself and ``segments`` are not used."""
        assert causal, "the ring's steps are those of causal attention"
        return _RingAttention.apply(q, k, v, self)

    def rows_at(self, number: int) -> int:
        return self.num_rows[(self.group.rank() - number) % len(self.num_rows)]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        held, last = torch.cat((k, v), dim=1), len(ring.steps) - 1
        out = torch.zeros_like(q, dtype=torch.float32)
        logarithms = out.new_full(q.shape[:2], -torch.inf)
        for number, step in enumerate(ring.steps):
            coming = Passing(held, ring.rows_at(number + 1), ring.group) if number < last else None
            if step is not None:
                keys, values = _rows(held, step.keys).chunk(2, dim=1)
                partial = ring.partial.forward(_rows(q, step.queries), keys, values, step.pairs)
                _join(out, logarithms, partial, step.queries)
            held = held if coming is None else coming.wait()
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, logarithms)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Keys go around again, followed by the sum of their gradients, which ends at the rank that owns them."""
        q, k, v, out, logarithms = ctx.saved_tensors
        ring: Ring = ctx.ring
        held, last, summed = torch.cat((k, v), dim=1), len(ring.steps) - 1, None
        q_gradient = torch.zeros_like(q, dtype=torch.float32)
        for number, step in enumerate(ring.steps):
            coming = Passing(held, ring.rows_at(number + 1), ring.group) if number < last else None
            found = None
            if step is not None:
                keys, values = _rows(held, step.keys).chunk(2, dim=1)
                whole = _rows(out, step.queries), _rows(logarithms, step.queries)
                rows = _rows(gradient, step.queries), _rows(q, step.queries)
                of_queries, *found = ring.partial.backward(*rows, keys, values, whole, step.pairs)
                _add(q_gradient, of_queries, step.queries)
            total = torch.zeros_like(held, dtype=torch.float32) if summed is None else summed.wait()
            if step is not None and found is not None:
                _add(total, torch.cat(found, dim=1), step.keys)
            summed = Passing(total, ring.rows_at(number + 1), ring.group)
            held = held if coming is None else coming.wait()
        assert summed is not None, "a ring has a rank"
        k_gradient, v_gradient = summed.wait().to(k.dtype).chunk(2, dim=1)
        return q_gradient.to(q.dtype), k_gradient, v_gradient, None


def _rows(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)


def _add(total: Tensor, rows: Tensor, index: Tensor | None) -> None:
    """Add ``rows`` to the indexed rows of ``total``; an index has no duplicates, so the sum is deterministic."""
    if index is None:
        total += rows
    else:
        total.index_add_(0, index, rows.to(total.dtype))


def _join(out: Tensor, logarithms: Tensor, partial: PartialOutput, index: Tensor | None) -> None:
    """Add a partial result in place: both outputs are weighted by their share of the sum of exponentials."""
    before = _rows(logarithms, index)
    joint = torch.logaddexp(before, partial[1])
    kept, added = ((one - joint).exp().unsqueeze(-1) for one in (before, partial[1]))
    joined = _rows(out, index) * kept + partial[0] * added
    if index is None:
        out.copy_(joined)
        logarithms.copy_(joint)
    else:
        out.index_copy_(0, index, joined)
        logarithms.index_copy_(0, index, joint)
