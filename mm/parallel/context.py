"""Which rows of a microbatch each rank holds: a shard of each layer's rows under sequence parallelism, tokens under
context parallelism, and whole images.

Context parallelism divides tokens row by row; images stay whole, and with whole encoders
(``ModelConfig.encodes_whole``) the ranks of the tensor-parallel axis divide them too.  Some ranks may hold none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mm.batch import Grid, Microbatch

# Context parallelism


def even_rows(num_rows: int, num_ranks: int) -> list[Tensor]:
    """int64 rows of each rank: contiguous, with counts that differ by at most one."""
    ends = [num_rows * rank // num_ranks for rank in range(num_ranks + 1)]
    return [torch.arange(start, stop) for start, stop in pairwise(ends)]


def zigzag_lengths(length: int, num_ranks: int) -> list[tuple[int, int]]:
    """How many tokens of a segment each rank holds, as (tokens of its early piece, tokens of its late piece).

    The segment is cut into 2 x ``num_ranks`` pieces, and rank r holds pieces r and -1 - r.  With two ranks::

        piece   0  1  2  3
        rank    0  1  1  0

    In causal attention later tokens see more keys; each pair of an early and a late piece costs the same.
    """
    num_pieces = 2 * num_ranks
    ends = [length * piece // num_pieces for piece in range(num_pieces + 1)]
    sizes = [stop - start for start, stop in pairwise(ends)]
    return [(sizes[rank], sizes[-1 - rank]) for rank in range(num_ranks)]


def zigzag_rows(segment_lengths: Sequence[int], num_ranks: int) -> list[Tensor]:
    """int64 rows of each rank, ascending: its two pieces of every segment (see ``zigzag_lengths``)."""
    rows: list[list[Tensor]] = [[torch.empty(0, dtype=torch.int64)] for _ in range(num_ranks)]
    for stop, length in zip(accumulate(segment_lengths), segment_lengths, strict=True):
        head, tail = stop - length, stop
        for rank, (first, last) in enumerate(zigzag_lengths(length, num_ranks)):
            rows[rank] += [torch.arange(head, head + first), torch.arange(tail - last, tail)]
            head, tail = head + first, tail - last
    return [torch.cat(pieces) for pieces in rows]


def deal(costs: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """Assign each of ``costs`` to a rank: largest first, each to the least loaded rank (LPT, Graham 1969)."""
    loads, ranks = [0.0] * num_ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        ranks[number] = min(range(num_ranks), key=loads.__getitem__)
        loads[ranks[number]] += costs[number]
    return tuple(ranks)


@dataclass(frozen=True)
class Context:
    """How microbatches are divided over the context axis, seen from one of its ranks."""

    group: dist.ProcessGroup
    encoders: dist.ProcessGroup
    """Images are divided over its ranks: ``group``, or with whole encoders all ranks of both axes, where rank t of the
    tensor-parallel axis and rank c of the context axis is number t + tensor-parallel size x c."""
    is_ring: bool = False
    """Ring attention (keys and values circulate, tokens are divided in a zigzag); otherwise Ulysses."""
    is_alone: bool = False
    """This rank processes whole microbatches, regardless of other ranks."""

    @property
    def size(self) -> int:
        return 1 if self.is_alone else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.is_alone else self.group.rank()

    @property
    def num_encoders(self) -> int:
        return 1 if self.is_alone else self.encoders.size()

    @property
    def encoders_per_share(self) -> int:
        """Ranks that hold the same tokens but images of their own."""
        return self.num_encoders // self.size

    def share(self, microbatch: Microbatch) -> "Share":
        if self.is_ring:
            rows = zigzag_rows(microbatch.segment_lengths, self.size)
        else:
            rows = even_rows(microbatch.num_tokens, self.size)
        return Share(self, rows)

    def num_tokens(self, microbatch: Microbatch) -> int:
        return microbatch.num_tokens if self.size == 1 else len(self.share(microbatch).here)

    def images(self, microbatch: Microbatch) -> tuple[int, ...]:
        return images_of(microbatch, self.encoders.rank() if self.num_encoders > 1 else None)

    def image_grids(self, microbatch: Microbatch) -> tuple[Grid, ...]:
        return tuple(microbatch.image_grids[number] for number in self.images(microbatch))


def images_of(microbatch: Microbatch, rank: int | None) -> tuple[int, ...]:
    """Indices of the images that a rank of ``Context.encoders`` holds; None: a single rank, which holds all."""
    if rank is None:
        return tuple(range(len(microbatch.image_grids)))
    assert len(microbatch.image_ranks) == len(microbatch.image_grids), "images were not dealt"
    return tuple(number for number, holder in enumerate(microbatch.image_ranks) if holder == rank)


@dataclass(frozen=True, eq=False)
class Share:
    """How one microbatch's tokens are divided over the ranks of ``context``."""

    context: Context
    rows: list[Tensor]
    """For each rank, its rows of the packed microbatch: int64, ascending."""

    @property
    def here(self) -> Tensor:
        return self.rows[self.context.rank]

    @property
    def num_rows(self) -> tuple[int, ...]:
        return tuple(map(len, self.rows))

    def find(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Which of ``rows`` (int64, of the packed microbatch) this rank holds (bool), and their indices in ``here``."""
        here = self.here
        if not len(here):
            return torch.zeros(len(rows), dtype=torch.bool), rows[:0]
        where = torch.searchsorted(here, rows).clamp(max=len(here) - 1)
        is_here = here[where] == rows
        return is_here, where[is_here]


def all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first ``sent[0]`` rows to rank 0 of ``group``, the next to rank 1, and so on; return the rows received,
    in rank order.  Autograd does not see it."""
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived


class Passing:
    """An exchange in flight: rows go to the next rank of a ring while the previous rank's rows come in."""

    def __init__(self, rows: Tensor, num_coming: int, group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_process_group_ranks(group), group.rank()
        self._sent, self._coming = rows.contiguous(), rows.new_empty((num_coming, *rows.shape[1:]))
        ends = ((dist.isend, self._sent, (rank + 1) % len(ranks)), (dist.irecv, self._coming, rank - 1))
        operations = [dist.P2POp(operation, tensor, ranks[peer], group)
                      for operation, tensor, peer in ends if tensor.numel()]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor:
        """Wait for both directions and return the received rows; the sent rows may then be overwritten."""
        for work in self._works:
            work.wait()
        return self._coming


# Sequence parallelism: what each tensor-parallel rank holds between two linear layers


def row_shard(num_rows: int, multiple: int, rank: int, num_ranks: int) -> slice:
    """One rank's rows: equally many, multiples of ``multiple``, on all ranks but the last, which may have few or
    none."""
    assert num_rows % multiple == 0, (num_rows, multiple)
    size = -(-num_rows // multiple // num_ranks) * multiple
    return slice(min(rank * size, num_rows), min((rank + 1) * size, num_rows))


@dataclass(frozen=True)
class RowShards:
    """A division of ``num_rows`` rows over ``group``.  Buffers of a collective are padded to equal size."""

    num_rows: int
    group: dist.ProcessGroup
    multiple: int = 1

    @property
    def here(self) -> slice:
        return row_shard(self.num_rows, self.multiple, self.group.rank(), self.group.size())

    @property
    def padded_rows(self) -> int:
        """Rows of the longest shard: the first rank's."""
        return row_shard(self.num_rows, self.multiple, 0, self.group.size()).stop

    def gather(self, shard: Tensor) -> Tensor:
        """[rows here, width] of every rank -> [num_rows, width] on all."""
        _, whole = self._gather(shard, is_async=False)
        return whole

    def start_gathering(self, shard: Tensor) -> tuple[dist.Work, Tensor]:
        """Start ``gather``; the rows are valid once the work is done."""
        work, whole = self._gather(shard, is_async=True)
        assert work is not None, "torch returns one with async_op"
        return work, whole

    def _gather(self, shard: Tensor, is_async: bool) -> tuple[dist.Work | None, Tensor]:
        whole = shard.new_empty(self.group.size() * self.padded_rows, shard.shape[1])
        padded = _padded(shard, self.padded_rows)
        work = dist.all_gather_into_tensor(whole, padded, group=self.group, async_op=is_async)
        return work, whole[: self.num_rows]  # padding is at the end only: all shards before a smaller one are full

    def start_reducing(self, whole: Tensor) -> tuple[dist.Work, Tensor]:
        """[num_rows, width] of every rank -> this rank's rows of the sum, valid once the work is done."""
        shard = whole.new_empty(self.padded_rows, whole.shape[1])
        padded = _padded(whole, self.group.size() * self.padded_rows)
        work = dist.reduce_scatter_tensor(shard, padded, group=self.group, async_op=True)
        assert work is not None, "torch returns one with async_op"
        here = self.here
        return work, shard[: here.stop - here.start]


def _padded(rows: Tensor, num_rows: int) -> Tensor:
    return rows.contiguous() if len(rows) == num_rows else F.pad(rows, (0, 0, 0, num_rows - len(rows)))
