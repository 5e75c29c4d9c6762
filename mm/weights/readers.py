"""Which of the ranks that hold the same weights reads each one.

One rank reads a weight and the others get it from there, so a model is read once, however many replicas train it.
Pure: opens no file.
"""

from collections.abc import Sequence
from heapq import heapreplace


def readers(num_bytes: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """The rank that reads each weight, so that all ranks read about as much; the same answer on every rank.

    ``num_bytes``: of each weight.  The greedy rule, the largest weight first and each to the rank that reads least: the
    most and the least that a rank reads differ by no more than the largest weight.  Of ranks that read equally little
    the furthest apart come first, because neighbours share a host and its way to the disk.
    """
    # Ranks with their bits reversed are such an order: 0, 4, 2, 6, 1, 5, 3, 7.  Sorted, they already are a heap.
    bits = (num_ranks - 1).bit_length()
    apart = sorted(range(num_ranks), key=lambda rank: f"{rank:0{bits}b}"[::-1])
    loads = [(0, place) for place in range(num_ranks)]
    chosen = [0] * len(num_bytes)
    for number in sorted(range(len(num_bytes)), key=lambda number: -num_bytes[number]):
        load, place = loads[0]
        chosen[number] = apart[place]
        heapreplace(loads, (load + num_bytes[number], place))
    return tuple(chosen)
