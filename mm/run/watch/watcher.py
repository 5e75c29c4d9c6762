"""The seam for what watches a run: the loop tells each watcher of every step, and a feature is one class."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from mm.batch import StepPlan
from mm.parallel.activity import Journal
from mm.run.progress import StepResult, TrainingProgress


@dataclass
class Step:
    """A step that has ended; watchers add what they measure."""

    progress: TrainingProgress
    plan: StepPlan
    result: StepResult
    epoch: float
    seconds: float
    """Time since the step before ended, without pauses.  A step ends when the host has read its gradient norm; Adam,
    still running, counts towards the next step."""
    own_data_seconds: float
    """How long the host waited for samples that this rank reads itself."""
    measured: dict[str, Any] = field(default_factory=dict)
    """Fields of ``StepMetrics``."""
    lines: list[str] = field(default_factory=list)
    """To be printed after the log line."""


class Watcher:
    """What watches a run; every rank calls these methods together.  By default they do nothing."""

    def before(self, iteration: int) -> None:
        """The step begins."""

    def after(self, step: Step) -> None:
        """The step has ended, and the run pauses."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The body is not part of a step, such as a save or a validation."""
        yield

    def close(self, done: int) -> None:
        """The run has ended after iteration ``done``, without an error."""


class Watch:
    """Measures the time of the steps, and tells all watchers of them."""

    def __init__(self, watchers: Sequence[Watcher], journal: Journal, listeners: Sequence[Any]) -> None:
        """``listeners``: those of ``watchers`` that follow every step's activities."""
        self._watchers, self._journal, self._listeners = watchers, journal, listeners
        self._began = 0.0
        """When the step began on the host's clock, later by the time in which it was paused."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The body runs the steps."""
        self._began = time.perf_counter()
        self._journal.listeners.extend(self._listeners)
        yield
        for listener in self._listeners:
            self._journal.listeners.remove(listener)

    def before(self, iteration: int) -> None:
        for watcher in self._watchers:
            watcher.before(iteration)

    def after(
        self, progress: TrainingProgress, plan: StepPlan, result: StepResult, epoch: float, own_data_seconds: float
    ) -> Step:
        """The step, as all watchers have measured it."""
        ended = time.perf_counter()
        step = Step(progress, plan, result, epoch, ended - self._began, own_data_seconds)
        self._began = ended
        with self.paused():
            for watcher in self._watchers:
                watcher.after(step)
        return step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside from the steps."""
        started = time.perf_counter()
        with ExitStack() as stack:
            for watcher in self._watchers:
                stack.enter_context(watcher.paused())
            yield
        self._began += time.perf_counter() - started

    def close(self, done: int) -> None:
        for watcher in self._watchers:
            watcher.close(done)
