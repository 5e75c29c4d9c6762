"""Ends all ranks when one dies, fails or takes too long, after a report of the cause and of where each rank was.

``heartbeat.py`` does that; here are the limits, and what a rank is doing, as the journal and the communicator say.  It
begins before the first process group is made, so this module imports no megatron and touches no device.
"""

import faulthandler
import math
import re
import signal
import statistics
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from mm.batch import StepPlan, samples_text
from mm.config.args import PHASE_SECONDS
from mm.device.device import PLATFORMS
from mm.errors import AgreedError, ReportedError, Stopped, StoppedRun, UserError
from mm.parallel.activity import Journal, Work
from mm.parallel.health.heartbeat import Cause, Heartbeat
from mm.parallel.health.rendezvous import Rendezvous
from mm.process import defer_stopping, status_after

if TYPE_CHECKING:
    from mm.parallel.mesh import Mesh
    from mm.parallel.pipeline.p2p import PipelineCommunicator

USUAL_SECONDS, USUAL_FACTOR = 300.0, 10.0
"""A step may take this long, or this many times the median of the latest steps, if --step-timeout says nothing."""
FIRST_SECONDS = 1800.0
"""The first step of a process may take this long in any case: kernels are compiled and data workers start."""
_END_SECONDS = 30.0
"""How long a rank that has reported its failure waits for the end of all ranks, and how long a rank whose error all
ranks share waits for the others to leave."""
_STANDARD_ERROR = 2
_LOST = re.compile("|".join((*(one.backend for one in PLATFORMS), "connection", "broken pipe")), re.IGNORECASE)
"""Words that mark a torch RuntimeError as failed communication, whose cause may lie on another rank."""


Phase = Callable[[str], AbstractContextManager[None]]
"""``Watchdog.phase``, for code that needs nothing else of the watchdog."""


class Watchdog:
    """A context manager that guards this rank's part of a run.

    An error raised inside is reported, unless it is a UserError, and ReportedError is raised instead; ranks that are
    not the cause exit without raising.  A rank whose ``facts`` differ from those of rank 0 ends the run.
    """

    def __init__(
        self, rendezvous: Rendezvous, step_seconds: float | None, phase_seconds: Mapping[str, float] = PHASE_SECONDS,
        facts: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.plan: StepPlan | None = None
        self.at_end: Callable[[], None] = lambda: None
        """Called before this process is ended in the middle of its work."""
        self._mesh: Mesh | None = None
        self._rendezvous, self._step_seconds, self._phase_seconds = rendezvous, step_seconds, phase_seconds
        self._facts = facts or {}
        self._heartbeat: Heartbeat | None = None
        self._journal: Journal | None = None
        self._communicator: PipelineCommunicator | None = None
        self._iteration, self._is_in_step, self._phase = 0, False, ""
        self._taken: deque[float] = deque(maxlen=100)
        self._is_limited = False

    def meet(self) -> Store:
        """Wait for all ranks; return a store for process groups that has only this attempt's keys.

        What a rank must check before the others may continue, it checks before this call.
        """
        heartbeat = self._beating
        heartbeat.state = "ready"
        heartbeat.beat()
        with self.phase("check"):  # of rank 0
            heartbeat.begun.wait()
        if heartbeat.problem is not None:
            raise heartbeat.problem
        assert heartbeat.attempt is not None, "it has joined, or there is a problem"
        return PrefixStore(f"mm/{heartbeat.attempt.prefix}", self._rendezvous.open_store())

    def place(self, mesh: "Mesh") -> None:
        """Tell the others this rank's place on the axes."""
        self._mesh = mesh
        self._beating.beat()  # in case this rank dies within the first second

    def follow(self, journal: Journal, communicator: "PipelineCommunicator") -> None:
        """Give the report access to what this rank is doing.  From now on the time between phases is limited too."""
        self._journal, self._communicator = journal, communicator

    @contextmanager
    def step(self, iteration: int, phase: str = "") -> Iterator[None]:
        """Guard one training step, including the wait for its data, or a step of another ``phase`` under this limit."""
        self._iteration, self._is_in_step, self.plan = iteration, True, None
        limit, started = limit_seconds(self._step_seconds, self._taken), time.monotonic()
        with self._limited(phase, limit, f"iteration {iteration} has taken more than {limit:.0f} s on rank "
                                         f"{self._rendezvous.rank}; --step-timeout sets this limit"):  # fmt: skip
            yield
        self._is_in_step = False  # an error stays in its step
        if not phase:
            self._taken.append(time.monotonic() - started)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Guard another phase of the run, one of ``mm.config.args``.  Phases and steps do not overlap."""
        limit = self._phase_seconds[name] or math.inf
        text = (f"the phase {name!r} has taken more than {limit:.0f} s on rank {self._rendezvous.rank}; "
                f"--phase-timeouts {name}=SECONDS sets this limit")
        with self._limited(name, limit, text):
            yield

    @contextmanager
    def _limited(self, phase: str, limit: float, lateness: str) -> Iterator[None]:
        assert not self._is_limited, f"{phase} begins within {self._phase}"
        self._is_limited, self._phase = True, phase
        self._set_limit(limit, lateness)
        self._beating.beat()  # in case this process is stopped
        if limit < math.inf:  # runs without the GIL, which the heartbeat may not get
            faulthandler.dump_traceback_later(limit + _END_SECONDS, exit=True, file=_STANDARD_ERROR)
        try:
            yield
        finally:
            self._is_limited = False
            self._set_limit(math.inf, lateness)
            faulthandler.cancel_dump_traceback_later()
        self._phase = ""  # an error stays in its phase
        if self._journal is not None and (rest := self._phase_seconds["between"]):
            self._set_limit(rest, f"rank {self._rendezvous.rank} made no progress outside any phase for {rest:.0f} s; "
                                  f"--phase-timeouts between=SECONDS sets this limit")

    def _set_limit(self, seconds: float, lateness: str) -> None:
        self._beating.lateness, self._beating.deadline = lateness, time.monotonic() + seconds

    @property
    def _beating(self) -> Heartbeat:
        assert self._heartbeat is not None, "entered"
        return self._heartbeat

    def __enter__(self) -> "Watchdog":
        self._heartbeat = Heartbeat(self._rendezvous, self._facts, self._place, lambda: self.at_end(),
                                    self._phase_seconds["between"] or math.inf)
        if self._rendezvous.rank == 0:
            self._heartbeat.joined.wait()
        if self._heartbeat.problem is not None:
            raise self._heartbeat.problem
        return self

    def __exit__(self, _: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._leave(error)
        finally:  # a process group that is alive when the interpreter exits aborts it
            self._journal = self._communicator = self.plan = self._mesh = None

    def _leave(self, error: BaseException | None) -> None:
        """Tell the others how the run ended on this rank, and wait for what follows:

        1. A signal asked it to stop: the first rank to report this is the cause; raises StoppedRun.
        2. No error, an error that all ranks share, or an exit: report a normal end and wait for the other ranks.
        3. A UserError on this rank only: end all ranks with status 2; the caller prints it.
        4. Any other error: end all ranks; raises ReportedError.  After a failed message, another rank may be the cause.
        """
        heartbeat, rank = self._beating, self._rendezvous.rank
        if isinstance(error, KeyboardInterrupt):
            number = error.number if isinstance(error, Stopped) else signal.SIGINT
            heartbeat.end_all(Cause(rank, status=status_after(number)))
            self._is_ended()
            raise StoppedRun(number) from error
        is_agreed = isinstance(error, AgreedError) or (isinstance(error, UserError) and self._rendezvous.num_ranks == 1)
        heartbeat.deadline = math.inf
        if error is None or is_agreed or not isinstance(error, Exception):
            heartbeat.state = "leaving"
            heartbeat.beat()
            heartbeat.finished.wait(None if error is None else _END_SECONDS if is_agreed else 1.0)
            return
        defer_stopping()  # the launcher ends its ranks when one fails, but this one has to report why
        if isinstance(error, UserError):
            heartbeat.end_all(Cause(rank, status=2))
            self._is_ended()
            return
        name = f"rank {rank} failed with {type(error).__name__}: {error}"
        text = f"{name}\n{''.join(traceback.format_exception(error))}".rstrip()
        if isinstance(error, ConnectionError | dist.DistError) or (
            isinstance(error, RuntimeError) and _LOST.search(str(error))
        ):
            heartbeat.lost = text
            heartbeat.beat()
        else:
            heartbeat.end_all(Cause(rank, text))
        if self._is_ended():
            raise ReportedError(name) from error

    def _is_ended(self) -> bool:
        """Wait for the end of all ranks because of this one; False if it does not come.  If another rank is the cause,
        the heartbeat ends this process meanwhile."""
        heartbeat = self._beating
        return heartbeat.attempt is not None and heartbeat.ordered.wait(_END_SECONDS)

    def _place(self) -> str:
        """Where this rank is on the axes, and what it is doing, in words."""
        mesh, journal, plan = self._mesh, self._journal, self.plan
        if mesh is None:
            has_begun = self._heartbeat is not None and self._heartbeat.begun.is_set()
            what = "creates its process groups" if has_begun else "prepares, or waits for other ranks"
            return what + (f" (phase {self._phase!r})" if self._phase else "")
        context = f"context-parallel rank {mesh.cp_rank}, " if mesh.cp_size > 1 else ""
        where = f"stage {mesh.pp_rank}, tensor-parallel rank {mesh.tp_rank}, {context}data-parallel rank {mesh.dp_rank}"
        if not self._is_in_step or journal is None or self._communicator is None:
            what = f"in phase {self._phase!r}" if self._phase else "outside of a step"
            return f"{where}: {what}" + (f", after iteration {self._iteration}" if self._iteration else "")
        now = journal.failed or journal.now
        what = "between two pieces of work" if now is None else str(now.work)
        if now is not None and now.work is Work.EXCHANGE:
            what += f": {'; '.join(self._communicator.latest_messages())}"
        elif now is not None and now.microbatch is not None and plan is not None:
            samples = plan.microbatches[now.microbatch].samples
            what += f" of microbatch {now.microbatch}, chunk {now.chunk}{samples_text(samples)}"
        return f"{where}: iteration {self._iteration}, {self._phase and self._phase + ', '}{what}"


def limit_seconds(given: float | None, taken: Collection[float]) -> float:
    """Limit of the next step in seconds: ``given`` by the user (0: none), or derived from those ``taken`` by past
    steps.
    """
    if given == 0:
        return math.inf
    usual = max(USUAL_SECONDS, USUAL_FACTOR * statistics.median(taken or [0.0]))
    limit = usual if given is None else given
    return limit if taken else max(limit, FIRST_SECONDS)
