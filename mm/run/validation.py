"""Validation: the loss per target token over exactly the validation samples, equal in every layout."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

from mm.batch import StepPlan
from mm.config.args import Arguments
from mm.config.validation import is_due
from mm.data.loader.validation import ValidationPlan
from mm.parallel.activity import Work
from mm.parallel.agreement import all_of
from mm.parallel.health.watchdog import Watchdog
from mm.progress import Progress
from mm.run.progress import BestSoFar, Say, TrainingProgress
from mm.run.step import Setup, forward
from mm.run.watch.metrics import ValidationMetrics
from mm.run.watch.reporter import Reporter


class Validator:
    """The validations of a run, which may end it early."""

    def __init__(
        self, args: Arguments, setup: Setup, watchdog: Watchdog, plan: ValidationPlan | None, plans: Iterator[StepPlan],
        reporter: Reporter, say: Say,
    ) -> None:  # fmt: skip
        """``plan`` is None without validation; ``plans``: those of the run's steps and validations in turn."""
        self._args, self._setup, self._watchdog, self._plan = args, setup, watchdog, plan
        self._plans, self._reporter, self._say = plans, reporter, say

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

    def after(self, progress: TrainingProgress) -> BestSoFar:
        """Validate and report if it is due after this step; the lowest loss so far."""
        plan, iteration = self._plan, progress.iteration
        if plan is None or not is_due(self._args, iteration):
            return progress.best
        started = time.perf_counter()
        loss, num_samples, num_target_tokens = validate(
            self._setup, self._plans, plan.num_plans, self._watchdog, iteration)
        best = progress.best.after(loss, iteration)
        self._reporter.report_validation(ValidationMetrics(
            iteration=iteration, consumed_samples=progress.consumed_samples, validation_loss=loss,
            num_samples=num_samples, num_target_tokens=num_target_tokens,
            validation_seconds=time.perf_counter() - started, best_validation_loss=best.loss,
            best_iteration=best.iteration))
        return best

    def ends(self, best: BestSoFar) -> bool:
        """Whether the run ends because of ``--early-stopping-patience``; the same on every rank, because losses are."""
        patience = self._args.early_stopping_patience
        return self._plan is not None and patience is not None and best.num_since >= patience


def validate(
    setup: Setup, data: Iterator[StepPlan], num_plans: int, watchdog: Watchdog, iteration: int
) -> tuple[float | None, int, int]:
    """The loss of the current weights over the next ``num_plans`` plans of ``data``, and their numbers of samples and
    tokens that count.  The loss is None if it is not finite, or there is no target token.

    Losses of microbatches are added exactly, so it does not matter which replica computes which.
    """
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
    return loss, num_samples, num_target_tokens


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
