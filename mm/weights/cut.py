"""Which indices of which Hugging Face tensors make up one rank's shard of a weight, as spans.

Byte plans need this without loading any weight.  The trick: number the indices, apply the layout rules of
``mm.weights.table`` to the numbers, and read off where each went.  No layout rule is repeated here.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from mm.weights.table import Weight, fuse_pieces, hf_ranges


@dataclass(frozen=True)
class Span:
    """Consecutive indices of one Hugging Face tensor along ``cut_dim``."""

    key: str | None
    """Published name of the Hugging Face tensor; None for zero padding."""
    start: int
    """First index in that tensor; 0 for padding."""
    length: int

    @property
    def stop(self) -> int:
        """One after the last index."""
        return self.start + self.length


def cut_dim(weight: Weight) -> int:
    """The one dimension along which the shards of ``weight`` differ from its Hugging Face tensors."""
    return weight.tp_dim or 0


@cache  # a comparison of two directories asks for the same shards again
def shard_spans(weight: Weight, tp_size: int, tp_rank: int) -> tuple[Span, ...]:
    """One rank's shard from its first index along ``cut_dim`` to its last.

    Tensors a (4 indices) and b (2) are numbered 1 2 3 4 and 6 7.  If the rules give this rank 1 2 6 0, its spans are
    a[0:2], b[0:1] and one of padding.  Raises UserError if ``tp_size`` does not divide the weight.
    """
    dim = cut_dim(weight)
    sizes = [shape[dim] for shape in weight.hf_shapes]
    is_cut = weight.tp_dim is not None
    ranges = hf_ranges(weight, tp_size, tp_rank) if is_cut else tuple((range(size),) for size in sizes)
    # Numbers start at 1, because padding is 0, and skip one between tensors, so that no span crosses an end.
    firsts = [1 + sum(sizes[:index]) + index for index in range(len(sizes))]
    pieces: list[torch.Tensor] = []
    for first, kept in zip(firsts, ranges, strict=True):
        numbers = torch.cat([torch.arange(first + one.start, first + one.stop) for one in kept])
        pieces.append(numbers.reshape((1,) * dim + (-1,)))
    numbers = fuse_pieces(weight, pieces, tp_size).flatten()
    continues = numbers[1:] - numbers[:-1] == (numbers[:-1] != 0).long()
    starts = [0, *(int(place) + 1 for place in torch.nonzero(~continues))]
    spans: list[Span] = []
    for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True):
        number = int(numbers[start])
        if number == 0:
            spans.append(Span(None, 0, stop - start))
        else:
            index = max(index for index, first in enumerate(firsts) if first <= number)
            spans.append(Span(weight.hf_names[index], number - firsts[index], stop - start))
    return tuple(spans)


def share_numbers(weight: Weight, one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two shards (number of shards, which one) of a weight with a ``tp_dim`` have any number in common."""
    cut = replace(weight, is_whole=False)
    pairs = zip(hf_ranges(cut, *one), hf_ranges(cut, *other), strict=True)
    return any(max(a.start, b.start) < min(a.stop, b.stop) for first, second in pairs for a in first for b in second)
