"""Measured over predicted time of the blocks of each kind: factors fitted to measured passes.

A kind gets a factor only if the passes determine it.  Kinds that take part in the same passes in similar shares, such
as two kinds of ViT layers, share a factor if the passes do not tell them apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mm.plan.laws import nonnegative

MAX_ERROR = 0.2
"""A factor is determined if its standard error is at most this share of it."""
LEAST_LIKENESS = 0.8
"""Kinds can share a factor if the cosine of the angle between their seconds in all passes is at least this."""
_LEAST_REMAINDER = 1e-6
"""Others can replace a term if they explain all of it but this share."""


@dataclass(frozen=True)
class FittedFactors:
    """The factors of one direction."""

    values: tuple[float, ...]
    """By kind; 1 where the passes do not determine it."""
    groups: tuple[tuple[int, ...], ...]
    """Kinds whose factor is determined, each alone or with others that share it."""
    errors: tuple[float, ...]
    """The standard error of the factor of each group."""


def fitted_factors(predicted: np.ndarray, measured: np.ndarray) -> FittedFactors:
    """Factors that minimize the squares of ``predicted @ factors - measured``; none is negative.

    ``predicted``: seconds of each kind in each pass [num_passes, num_kinds].  ``measured``: those of
    whole passes [num_passes].
    """
    num_kinds = predicted.shape[1]
    groups = [(kind,) for kind in range(num_kinds) if predicted[:, kind].any()]
    left = measured.astype(float)
    while groups:
        terms = np.stack([predicted[:, list(group)].sum(axis=1) for group in groups], axis=1)
        factors, errors = _solved(terms, left)
        unsure = [number for number, (factor, error) in enumerate(zip(factors, errors, strict=True))
                  if factor <= 0 or error > MAX_ERROR * factor]
        if not unsure:
            return _factors(num_kinds, groups, factors, errors)
        smallest = min(unsure, key=lambda number: terms[:, number].sum())
        other = _most_alike(terms, smallest)
        if other is None:
            left = left - terms[:, smallest]  # it keeps the factor 1
            del groups[smallest]
        else:
            groups = _merged(groups, smallest, other)
    return _factors(num_kinds, [], np.empty(0), np.empty(0))


def _solved(terms: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The factors, and the standard error of each, which is infinite for a term that others can replace."""
    scale = max(float(np.abs(target).max()), 1e-12)
    terms, target = terms / scale, target / scale
    orthogonal, triangle = np.linalg.qr(terms)  # as many equations as terms, with the same solution
    factors = nonnegative(triangle, orthogonal.T @ target)
    num_free = len(target) - terms.shape[1]
    spread = np.sqrt(np.square(terms @ factors - target).sum() / num_free) if num_free > 0 else np.inf
    return factors, np.array([_error(terms, number, float(spread)) for number in range(terms.shape[1])])


def _error(terms: np.ndarray, number: int, spread: float) -> float:
    own, others = terms[:, number], np.delete(terms, number, axis=1)
    if others.size:
        own = own - others @ np.linalg.lstsq(others, own, rcond=None)[0]
    remainder = float(np.linalg.norm(own))
    return spread / remainder if remainder > _LEAST_REMAINDER * float(np.linalg.norm(terms[:, number])) else np.inf


def _most_alike(terms: np.ndarray, number: int) -> int | None:
    """The other term that is most like this one; None if none is similar enough."""
    directions = terms / np.linalg.norm(terms, axis=0)
    likeness = directions.T @ directions[:, number]
    likeness[number] = -1.0
    other = int(likeness.argmax())
    return other if likeness[other] >= LEAST_LIKENESS else None


def _merged(groups: Sequence[tuple[int, ...]], one: int, other: int) -> list[tuple[int, ...]]:
    both = tuple(sorted((*groups[one], *groups[other])))
    return [*(group for number, group in enumerate(groups) if number not in (one, other)), both]


def _factors(
    num_kinds: int, groups: Sequence[tuple[int, ...]], factors: np.ndarray, errors: np.ndarray
) -> FittedFactors:  # fmt: skip
    values = [1.0] * num_kinds
    for group, factor in zip(groups, factors.tolist(), strict=True):
        for kind in group:
            values[kind] = factor
    return FittedFactors(tuple(values), tuple(groups), tuple(errors.tolist()))
