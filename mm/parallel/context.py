"""Context parallelism: which tokens and which images of a microbatch each rank of the context axis holds.

Tokens are divided row by row, images whole.  Any number of either is divided, also one that the ranks do not divide:
some ranks hold fewer, or none.  All is a function of lengths that every rank knows; what rows mean is not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from mm.batch import Grid, Microbatch


def even_rows(num_rows: int, num_ranks: int) -> list[Tensor]:
    """int64 rows of each rank: neighbours stay together, and counts differ by one at most."""
    ends = [num_rows * rank // num_ranks for rank in range(num_ranks + 1)]
    return [torch.arange(start, stop) for start, stop in pairwise(ends)]


def zigzag_lengths(length: int, num_ranks: int) -> list[tuple[int, int]]:
    """Tokens of a segment that each rank holds: of the segment's 2 x ``num_ranks`` chunks, its own from the beginning
    and its own from the end.

    Of causal attention, where later tokens look at more keys, each pair of chunks has the same share.
    """
    num_chunks = 2 * num_ranks
    ends = [length * chunk // num_chunks for chunk in range(num_chunks + 1)]
    sizes = [stop - start for start, stop in pairwise(ends)]
    return [(sizes[rank], sizes[-1 - rank]) for rank in range(num_ranks)]


def zigzag_rows(segment_lengths: Sequence[int], num_ranks: int) -> list[Tensor]:
    """int64 rows of each rank, ascending: of every segment, what ``zigzag_lengths`` counts."""
    rows: list[list[Tensor]] = [[torch.empty(0, dtype=torch.int64)] for _ in range(num_ranks)]
    for stop, length in zip(accumulate(segment_lengths), segment_lengths, strict=True):
        head, tail = stop - length, stop
        for rank, (first, last) in enumerate(zigzag_lengths(length, num_ranks)):
            rows[rank] += [torch.arange(head, head + first), torch.arange(tail - last, tail)]
            head, tail = head + first, tail - last
    return [torch.cat(parts) for parts in rows]


def deal(costs: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """A rank for each of ``costs``: the dearest first, each to the rank that has least so far (LPT, Graham 1969)."""
    loads, ranks = [0.0] * num_ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        ranks[number] = min(range(num_ranks), key=loads.__getitem__)
        loads[ranks[number]] += costs[number]
    return tuple(ranks)


@dataclass(frozen=True)
class Context:
    """How microbatches are divided over the context axis, seen from one of its ranks."""

    group: dist.ProcessGroup
    is_ring: bool = False
    """Keys and values go around, and tokens are divided in a zigzag; else heads are exchanged for tokens (Ulysses)."""
    is_alone: bool = False
    """This rank has whole microbatches, whatever other ranks have."""

    @property
    def size(self) -> int:
        return 1 if self.is_alone else self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def share(self, microbatch: Microbatch) -> "Share":
        if self.is_ring:
            rows = zigzag_rows(microbatch.segment_lengths, self.size)
        else:
            rows = even_rows(microbatch.num_tokens, self.size)
        return Share(self, rows)

    def num_tokens(self, microbatch: Microbatch) -> int:
        """Tokens of ``microbatch`` that this rank holds."""
        return microbatch.num_tokens if self.size == 1 else len(self.share(microbatch).here)

    def images(self, microbatch: Microbatch) -> tuple[int, ...]:
        """Which images of ``microbatch`` this rank holds."""
        return images_of(microbatch, self.rank if self.size > 1 else None)

    def image_grids(self, microbatch: Microbatch) -> tuple[Grid, ...]:
        """Grids of these images."""
        return tuple(microbatch.image_grids[number] for number in self.images(microbatch))


def images_of(microbatch: Microbatch, rank: int | None) -> tuple[int, ...]:
    """Which images a rank of the context axis holds; None stands for the only one."""
    if rank is None:
        return tuple(range(len(microbatch.image_grids)))
    assert len(microbatch.image_ranks) == len(microbatch.image_grids), "images were not dealt"
    return tuple(number for number, holder in enumerate(microbatch.image_ranks) if holder == rank)


@dataclass(frozen=True, eq=False)
class Share:
    """What the ranks of ``context`` hold of one microbatch's tokens."""

    context: Context
    rows: list[Tensor]
    """int64, ascending: rows of the packed microbatch, for each rank."""

    @property
    def here(self) -> Tensor:
        return self.rows[self.context.rank]

    @property
    def num_rows(self) -> tuple[int, ...]:
        return tuple(map(len, self.rows))

    def rank_of_rows(self) -> Tensor:
        """int64 [num_tokens]: who holds each row of the packed microbatch."""
        ranks = torch.empty(sum(self.num_rows), dtype=torch.int64)
        for rank, rows in enumerate(self.rows):
            ranks[rows] = rank
        return ranks

    def find(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Which of ``rows`` (int64, of the packed microbatch) are here, and where among the rows here these are."""
        here = self.here
        if not len(here):
            return torch.zeros(len(rows), dtype=torch.bool), rows[:0]
        where = torch.searchsorted(here, rows).clamp(max=len(here) - 1)
        is_here = here[where] == rows
        return is_here, where[is_here]


def all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first ``sent[0]`` rows to rank 0 of ``group``, the next to rank 1, and so on; returns what comes, in the
    order of the ranks.  Autograd does not see it."""
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived


class Passing:
    """Rows on their way to the next rank of a ring, while those of the rank before come."""

    def __init__(self, rows: Tensor, num_coming: int, group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_process_group_ranks(group), group.rank()
        self._sent, self._coming = rows.contiguous(), rows.new_empty((num_coming, *rows.shape[1:]))
        ends = ((dist.isend, self._sent, (rank + 1) % len(ranks)), (dist.irecv, self._coming, rank - 1))
        operations = [dist.P2POp(operation, tensor, ranks[peer], group)
                      for operation, tensor, peer in ends if tensor.numel()]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor:
        """What came; what was sent may be overwritten."""
        for work in self._works:
            work.wait()
        return self._coming
