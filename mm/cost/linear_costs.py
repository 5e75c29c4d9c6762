"""How long a piece of work takes: seconds that are linear in its rows and pairs, fitted to measured times."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np


@dataclass(frozen=True)
class Law:
    """Seconds = fixed + per_row x rows + per_pair x pairs; 0 without rows.  No coefficient is negative."""

    fixed: float
    per_row: float
    per_pair: float = 0.0

    def seconds(self, rows: float, pairs: float = 0.0) -> float:
        return self.fixed + self.per_row * rows + self.per_pair * pairs if rows > 0 else 0.0

    def __add__(self, other: "Law") -> "Law":
        return Law(self.fixed + other.fixed, self.per_row + other.per_row, self.per_pair + other.per_pair)

    def __mul__(self, factor: float) -> "Law":
        return Law(self.fixed * factor, self.per_row * factor, self.per_pair * factor)


FREE = Law(0.0, 0.0)


@dataclass(frozen=True)
class Timed:
    """One measured time."""

    rows: float
    pairs: float
    seconds: float


def fitted(times: Sequence[Timed]) -> Law:
    """The law with the least sum of squared relative errors among those without a negative coefficient.

    ``times`` must not be empty, and each must be positive.  Every subset of the coefficients is tried, which is exact.
    """
    terms = np.array([[1.0, one.rows, one.pairs] for one in times]) / np.array([[one.seconds] for one in times])
    best, least = np.zeros(3), np.inf
    for chosen in (list(some) for count in (1, 2, 3) for some in combinations(range(3), count)):
        if not terms[:, chosen].any(axis=0).all():
            continue  # nothing was measured with such a term
        scale = np.abs(terms[:, chosen]).max(axis=0)
        found = np.linalg.lstsq(terms[:, chosen] / scale, np.ones(len(times)), rcond=None)[0] / scale
        error = float(np.square(terms[:, chosen] @ found - 1).sum())
        if (found >= 0).all() and error < least - 1e-12:
            best, least = np.zeros(3), error
            best[chosen] = found
    return Law(*best.tolist())


def relative_errors(law: Law, times: Sequence[Timed]) -> list[float]:
    """Predicted over measured seconds, minus 1, of each time."""
    return [law.seconds(one.rows, one.pairs) / one.seconds - 1 for one in times]
