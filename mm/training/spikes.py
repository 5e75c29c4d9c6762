"""Finds steps whose loss or gradient norm is far above that of the latest steps, and limits how many are skipped in a
row.

Everything here is computed from numbers that are equal on all ranks, so all ranks decide alike.
"""

import math
from dataclasses import dataclass
from statistics import median

from mm.errors import AgreedError
from mm.training.update import StepResult

NUM_RECENT = 100
"""Steps over which medians are taken."""
_NUM_NEEDED = 20
"""Steps before a median counts: the first steps of a training have the largest norms."""


@dataclass(frozen=True)
class RecentSteps:
    """Losses and gradient norms of the latest steps that changed the weights."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    num_bad: int = 0
    """Number of bad steps in a row up to now."""

    def max_norm(self, factor: float) -> float:
        """The gradient norm above which a step is a spike; infinite as long as too few steps are known."""
        return _limit(self.norms, factor)

    def spike(self, result: StepResult, factor: float) -> str:
        """Why the step is bad or a spike; empty if it is neither."""
        if result.fault:
            return result.fault
        for what, value, known in (("loss", result.loss, self.losses), ("gradient norm", result.grad_norm, self.norms)):
            if value > _limit(known, factor):
                return f"the {what} is {value:.4g}, more than {factor:g} times its median of {median(known):.4g}"
        return ""

    def after(self, result: StepResult, max_bad: int) -> "RecentSteps":
        """With this step added; raises AgreedError if it is one bad step in a row too many."""
        if result.fault:
            if self.num_bad + 1 > max_bad:
                before = "step before was" if self.num_bad == 1 else f"{self.num_bad} steps before were"
                raise AgreedError(f"{result.fault}, and the {before} bad too; --skip-bad-steps {max_bad} allows no "
                                  f"more in a row. Check the samples that metrics.jsonl lists for these steps, and the "
                                  f"learning rate")
            return RecentSteps(self.losses, self.norms, self.num_bad + 1)
        if not result.updated:  # loss scaling
            return self
        return RecentSteps((*self.losses, result.loss)[-NUM_RECENT:], (*self.norms, result.grad_norm)[-NUM_RECENT:])


def _limit(known: tuple[float, ...], factor: float) -> float:
    return factor * median(known) if len(known) >= _NUM_NEEDED else math.inf
