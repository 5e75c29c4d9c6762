"""When a run stops before its last step: after a signal, or at ``--exit-duration-in-mins``."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mm.process import STOPPING, Stopped, StopSignals, shown, status_after


@dataclass(frozen=True)
class Stop:
    """A reason to stop after a step."""

    cause: str
    """What the user or the scheduler did."""
    status: int
    """Exit status of the run."""


_STOPS = (*(Stop(shown(number), status_after(number)) for number in STOPPING), Stop("--exit-duration-in-mins", 0))
"""One vote for each."""


class Stopping:
    """This rank's votes on whether to stop, and what all ranks have decided.

    All ranks stop after the same step.  The update sums their votes with numbers that it sums anyway, so the agreement
    costs no message: a signal that reaches one rank is enough, and clocks may differ.
    """

    def __init__(self, signals: StopSignals, exit_minutes: float | None, saves: bool) -> None:
        """``saves``: a stop after a step saves a checkpoint; otherwise a signal ends the run within a step."""
        self.stop: Stop | None = None
        """Why the run stops; the same on all ranks."""
        self._signals, self._saves = signals, saves
        self._until = None if exit_minutes is None else signals.began + 60 * exit_minutes

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Guard the steps: a signal waits for the end of a step.  If one came too late for this run's last step to see
        it, Stopped is raised at the end."""
        if not self._saves:
            yield
            return
        with self._signals.deferred():
            yield
        if self.stop is None and self._signals.received is not None:
            raise Stopped(self._signals.received)

    def votes(self) -> list[bool]:
        """This rank's votes."""
        has_signal = [self._signals.received == number for number in STOPPING]
        return [*has_signal, self._until is not None and time.monotonic() >= self._until]

    def decide(self, sums: Sequence[float]) -> None:
        """Set ``stop`` from the votes of all ranks, summed."""
        self.stop = next((stop for stop, count in zip(_STOPS, sums, strict=True) if count), None)
