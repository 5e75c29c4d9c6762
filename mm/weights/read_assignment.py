"""Which of the ranks that hold the same weights reads each one.

One rank reads a weight and the others get it from there, so a model is read once, however many replicas train it.
Pure: opens no file.
"""

from collections.abc import Sequence
from heapq import heapreplace


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
