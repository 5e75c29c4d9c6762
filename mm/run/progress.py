"""How far a training has come: what a checkpoint restores besides the weights.

Everything here is computed from numbers that are equal on all ranks, so all ranks decide alike.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from mm.data.index.dataset import TrainedOn
from mm.errors import AgreedError, printable
from mm.parallel.mesh import Mesh
from mm.run.schedule import Schedule

NUM_RECENT = 100
"""Steps over which medians of the loss and of the gradient norm are taken."""
_NUM_NEEDED = 20
"""Steps before a median counts: the first steps of a training have the largest norms."""

Say = Callable[[str], None]
"""Prints one message, once for all ranks."""


def say_on_last_rank(mesh: Mesh) -> Say:
    """Return a function that prints on the last rank only, as Megatron does."""

    def say(text: str) -> None:
        if mesh.rank == mesh.world_size - 1:
            print(printable(text), flush=True)

    return say


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step; the same on every rank."""

    loss: float
    """The loss of the global batch, before the update."""
    lr: float
    grad_norm: float
    """Before clipping; 0 if a gradient overflowed."""
    loss_scale: float
    updated: bool
    """False if the weights are unchanged: a gradient overflowed under loss scaling, or the step is bad."""
    fault: str = ""
    """Why the step is bad; empty if it is not."""
    votes: tuple[float, ...] = ()
    """The ranks' votes, summed."""


@dataclass(frozen=True)
class RecentSteps:
    """Losses and gradient norms of the latest steps that changed the weights; finds spikes."""

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


@dataclass(frozen=True)
class BestSoFar:
    """The lowest validation loss of a training."""

    loss: float | None = None
    iteration: int = 0
    num_since: int = 0
    """Validations since then, all without a lower loss."""
    samples: str = ""
    """Fingerprint of the samples: losses over different samples are not compared."""

    def after(self, loss: float | None, iteration: int) -> "BestSoFar":
        """The state after one more validation; an unknown loss is never the lowest."""
        if loss is not None and (self.loss is None or loss < self.loss):
            return replace(self, loss=loss, iteration=iteration, num_since=0)
        return replace(self, num_since=self.num_since + 1)

    def of(self, samples: str) -> "BestSoFar":
        """The state for samples with this fingerprint, reset if they changed."""
        return self if samples == self.samples else BestSoFar(samples=samples)


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of the training, which determines the learning rate and the order of the data; saved in checkpoints."""

    iteration: int
    consumed_samples: int
    data: TrainedOn | None = None
    """None on ranks that read no data, and if a checkpoint does not say."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Notes for the user from ``load``."""
    best: BestSoFar = field(default_factory=BestSoFar)
    run_id: str | None = None
    """The id of the run that saves; None if an older version began it."""
    schedule: Schedule | None = None
    """The learning-rate schedule; set at the start of a run, not by ``load``."""
    given_start: Mapping[str, str | None] | None = None
    """See ``CheckpointManifest``, as for ``base``."""
    recent: RecentSteps = field(default_factory=RecentSteps)
    base: Mapping[str, Any] | None = None
