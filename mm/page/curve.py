"""A number recorded at every step of a run, in a bounded number of bins that lose no extreme value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_BINS = 400
"""Most bins of a curve.  A picture on a screen shows hardly more."""


@dataclass(slots=True)
class Bin:
    """The values of adjacent steps."""

    first: int
    """The first step."""
    last: int
    count: int = 0
    """Number of finite values."""
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    num_lost: int = 0
    """Number of values that are not finite."""

    @property
    def middle(self) -> float:
        """Where it is drawn, in steps."""
        return (self.first + self.last) / 2

    @property
    def mean(self) -> float:
        """Mean of the finite values; there must be some."""
        return self.total / self.count

    def add(self, step: int, value: float) -> None:
        if step > self.last:
            self.last = step
        if not math.isfinite(value):
            self.num_lost += 1
            return
        self.count += 1
        self.total += value
        if value < self.least:
            self.least = value
        if value > self.most:
            self.most = value

    def merge(self, other: "Bin") -> None:
        """Add the values of the next bin."""
        self.last = other.last
        self.count, self.total = self.count + other.count, self.total + other.total
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        self.num_lost += other.num_lost


class Curve:
    """Bins of equally many steps.  When there are too many, neighbours are merged in pairs, so memory is bounded."""

    def __init__(self, max_bins: int = MAX_BINS) -> None:
        self._max_bins = max_bins
        self.width = 1
        """Steps of a bin."""
        self.bins: list[Bin] = []
        """In the order of steps; steps without a value have no bin."""
        self._end = 0
        """The step at which the next bin begins."""

    def add(self, step: int, value: float) -> None:
        """Add the value of a step; steps come in ascending order."""
        if step >= self._end or not self.bins:
            self.bins.append(Bin(step, step))
            while len(self.bins) > self._max_bins:
                self._halve()
            self._end = (self.bins[-1].first // self.width + 1) * self.width
        self.bins[-1].add(step, value)

    def _halve(self) -> None:
        self.width *= 2
        merged: list[Bin] = []
        for one in self.bins:
            if merged and one.first // self.width == merged[-1].first // self.width:
                merged[-1].merge(one)
            else:
                merged.append(one)
        self.bins = merged

    @property
    def num_lost(self) -> int:
        """Number of values that are not finite."""
        return sum(one.num_lost for one in self.bins)

    def finite(self) -> list[Bin]:
        """The bins with finite values."""
        return [one for one in self.bins if one.count]


def stretches(bins: Sequence[Bin]) -> list[list[Bin]]:
    """Sequences of bins without a gap; a value that is not finite ends one."""
    found: list[list[Bin]] = [[]]
    for one in bins:
        if one.count:
            found[-1].append(one)
        if one.num_lost:
            found.append([])
    return [stretch for stretch in found if stretch]


def running_means(bins: Sequence[Bin], num_bins: int) -> list[float]:
    """For each bin, the mean of all values in the ``num_bins`` bins around it, or in fewer at the ends.  Each bin must
    have a finite value."""
    before, after = (num_bins - 1) // 2, num_bins // 2
    totals, counts = [0.0], [0]
    for one in bins:
        totals.append(totals[-1] + one.total)
        counts.append(counts[-1] + one.count)
    spans = ((max(0, number - before), min(len(bins), number + after + 1)) for number in range(len(bins)))
    return [(totals[end] - totals[start]) / (counts[end] - counts[start]) for start, end in spans]
