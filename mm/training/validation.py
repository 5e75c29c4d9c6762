"""Validation: the loss per target token over exactly the validation samples, equal in every layout.

Also tracks the lowest loss so far, and the number of validations since.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction

from mm.batch import StepPlan
from mm.config.flags import Arguments
from mm.config.validation import is_due
from mm.data.feed.validation import ValidationPlan
from mm.parallel.activity import Work
from mm.parallel.agreement import all_of
from mm.parallel.watchdog import Watchdog
from mm.progress import Progress
from mm.training.step import Setup, forward


@dataclass(frozen=True)
class BestSoFar:
    """The lowest validation loss of a training; saved in checkpoints for resumed runs."""

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
class ValidationLoss:
    """The result of one validation; the same on every rank."""

    loss: float | None
    """None if it is not finite, or there is no target token."""
    num_samples: int
    """Samples with a target token."""
    num_target_tokens: int
    seconds: float


class Validator:
    """The validations of a run, which may end it early."""

    def __init__(
        self, args: Arguments, setup: Setup, watchdog: Watchdog, plan: ValidationPlan | None, say: Callable[[str], None]
    ) -> None:
        """``plan`` is None without validation; ``say`` reports to the user."""
        self._args, self._setup, self._watchdog, self._plan, self._say = args, setup, watchdog, plan, say

    def begin(self, best: BestSoFar) -> BestSoFar:
        """The lowest loss before the run's first step, reset if the samples changed."""
        plan = self._plan
        if plan is None:
            return best
        known = best.of(plan.fingerprint)
        if best.loss is not None and known.loss is None:
            self._say("note: the validation samples changed: best loss reset")
        if plan.num_samples < plan.num_of_all:
            self._say(f"note: a validation uses {plan.num_samples} of {plan.num_of_all} samples, the same each time "
                      f"(--eval-iters {self._args.eval_iters})")
        return known

    def is_due(self, iteration: int) -> bool:
        """Whether a validation follows this step."""
        return self._plan is not None and is_due(self._args, iteration)

    def validate(self, plans: Iterator[StepPlan], iteration: int) -> ValidationLoss:
        """The loss of the current weights; takes one validation's plans from ``plans``."""
        assert self._plan is not None, "it is due only with a plan"
        return validate(self._setup, plans, self._plan.num_plans, self._watchdog, iteration)

    def ends(self, best: BestSoFar) -> bool:
        """Whether the run ends because of ``--early-stopping-patience``; the same on every rank, because losses are."""
        patience = self._args.early_stopping_patience
        return self._plan is not None and patience is not None and best.num_since >= patience


def validate(
    setup: Setup, data: Iterator[StepPlan], num_plans: int, watchdog: Watchdog, iteration: int
) -> ValidationLoss:
    """The loss of the current weights over the next ``num_plans`` plans of ``data``.

    Losses of microbatches are added exactly, so it does not matter which replica computes which.
    """
    started = time.perf_counter()
    total: Fraction | None = Fraction(0)
    num_samples = num_target_tokens = 0
    counts = setup.mesh.tp_rank == 0 and any(chunk.spec.has_head for chunk in setup.stage.chunks)
    shown = Progress("validating", num_plans, "steps", is_shown=setup.mesh.rank == 0)
    with evaluating(setup):
        for _ in shown.each(range(num_plans)):
            with watchdog.step(iteration, "validation"):
                with setup.stage.journal.during(Work.DATA):
                    watchdog.plan = plan = next(data)
                losses = forward(setup, plan).tolist()  # waits for the device
            num_samples += plan.totals.num_target_samples
            num_target_tokens += plan.totals.num_target_tokens
            total = _added(total, losses if counts else [])
    sums = [value for _, value in all_of(((setup.mesh.rank, total),), setup.mesh.control_group)]
    is_known = num_target_tokens > 0 and None not in sums
    loss = float(sum(value for value in sums if value is not None) / num_target_tokens) if is_known else None
    return ValidationLoss(loss, num_samples, num_target_tokens, time.perf_counter() - started)


def _added(total: Fraction | None, values: list[float]) -> Fraction | None:
    """``total`` plus ``values``; None once a value is not finite."""
    if total is None or not all(map(math.isfinite, values)):
        return None
    return total + sum(map(Fraction, values))


@contextmanager
def evaluating(setup: Setup) -> Iterator[None]:
    """Switch the modules to evaluation mode, with the gathered weights of the last update."""
    setup.finish_gathering()
    for model in setup.models:
        model.eval()
    try:
        yield
    finally:
        for model in setup.models:
            model.train()
