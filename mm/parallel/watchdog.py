"""Ends all ranks when one dies, fails or takes too long, after a report of the cause and of where each rank was.

A thread on each rank talks to the hub (``hub.py``), even while the main thread is stuck.  It starts before the first
process group is made, so this module imports no megatron and touches no device.  The journal and the communicator say
what the rank is doing.
"""

import faulthandler
import math
import re
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mm.batch import StepPlan, samples_text
from mm.config.phases import PHASE_SECONDS
from mm.device.platforms import PLATFORMS
from mm.errors import AgreedError, ReportedError, Stopped, StoppedRun, UserError, printable, refuse
from mm.parallel.activity import Journal, Work
from mm.parallel.hub import Hub, end
from mm.parallel.lines import Lines
from mm.parallel.meeting import Meeting
from mm.parallel.node import Identity, kill, own_identity
from mm.parallel.ranks import death_of
from mm.signals import defer_stopping, status_after

if TYPE_CHECKING:
    from mm.parallel.mesh import Mesh
    from mm.parallel.pipeline import PipelineCommunicator

USUAL_SECONDS, USUAL_FACTOR = 300.0, 10.0
"""A step may take this long, or this many times the median of the latest steps, if --step-timeout says nothing."""
FIRST_SECONDS = 1800.0
"""The first step of a process may take this long in any case: kernels are compiled and data workers start."""
_BEAT_SECONDS = 1.0
_HUB_SECONDS = 15.0
"""How long a rank that has reported its failure waits for the hub's order to end, and how long a rank whose error all
ranks share waits for the others to leave."""
_SILENT_SECONDS = 7.0
"""How long a rank that has passed its time limit waits for the hub's order to end.  The hub itself waits 5 s for the
ranks' answers."""
_STANDARD_ERROR = 2
_OWN_THREADS = ("hub", "watchdog")
_LOST = re.compile("|".join((*(one.backend for one in PLATFORMS), "connection", "broken pipe")), re.IGNORECASE)
"""Words that mark a torch RuntimeError as failed communication, whose cause may lie on another rank."""


Phase = Callable[[str], AbstractContextManager[None]]
"""``Watchdog.phase``, for code that needs nothing else of the watchdog."""


class Watchdog:
    """A context manager that guards this rank's part of a run.

    The hub reports an error raised inside, unless it is a UserError, and ReportedError is raised instead; ranks that
    are not the cause exit without raising.  ``step_seconds`` limits a step; None derives the limit from the steps so
    far, 0 means no limit.  ``phase_seconds`` limits the other phases, named as in ``mm.config.phases``.  ``facts``:
    what this rank runs and its settings by name; a rank whose facts differ from those of rank 0 ends the run.  Every
    rank of ``meeting`` must enter and leave.
    """

    def __init__(
        self, meeting: Meeting, step_seconds: float | None, phase_seconds: Mapping[str, float] = PHASE_SECONDS,
        facts: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.plan: StepPlan | None = None
        """The current step's plan, once it is known."""
        self.at_end: Callable[[], None] = lambda: None
        """Called before this process is ended in the middle of its work."""
        self._mesh: Mesh | None = None
        self._meeting, self._step_seconds, self._phase_seconds = meeting, step_seconds, phase_seconds
        self._facts = facts or {}
        self._hub: Hub | None = None
        self._store: Store | None = None
        self._lines = Lines()
        self._journal: Journal | None = None
        self._communicator: PipelineCommunicator | None = None
        self._iteration, self._is_in_step, self._phase = 0, False, ""
        self._taken: deque[float] = deque(maxlen=100)
        self._deadline = math.inf
        self._lateness = ""
        """What to report when the deadline has passed."""
        self._hub_process: Identity | None = None
        self._is_leaving = self._is_unwatched = self._is_limited = False
        self._begun = threading.Event()
        self._ordered = threading.Event()
        self._cause_rank: int | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def meet(self) -> Store | None:
        """Wait for all ranks; return a store for process groups that has only this attempt's keys.

        It is None in a process that no launcher started.  What a rank must check before the others may continue, it
        checks before this call.  Raises UserError if rank 0 may not open as many files as it needs.
        """
        if self._hub is not None:
            refuse(self._hub.problems)
        self._lines.send(0, "ready")
        with self.phase("check"):  # of rank 0
            self._begun.wait()
        return self._store

    def place(self, mesh: "Mesh") -> None:
        """Tell the hub this rank's place on the axes."""
        self._mesh = mesh
        self._lines.send(0, "is at", self._place())  # immediately, in case this rank dies within the first second

    def follow(self, journal: Journal, communicator: "PipelineCommunicator") -> None:
        """Give the report access to what this rank is doing.  From now on the time between phases is limited too."""
        self._journal, self._communicator = journal, communicator

    @contextmanager
    def step(self, iteration: int, phase: str = "") -> Iterator[None]:
        """Guard one training step, including the wait for its data, or a step of another ``phase`` under this limit."""
        self._iteration, self._is_in_step, self.plan = iteration, True, None
        limit, started = limit_seconds(self._step_seconds, self._taken), time.monotonic()
        with self._limited(phase, limit, f"iteration {iteration} has taken more than {limit:.0f} s on rank "
                                         f"{self._meeting.rank}; --step-timeout sets this limit"):  # fmt: skip
            yield
        self._is_in_step = False  # an error stays in its step
        if not phase:
            self._taken.append(time.monotonic() - started)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Guard another phase of the run, one of ``mm.config.phases``.  Phases and steps do not overlap."""
        limit = self._phase_seconds[name] or math.inf
        text = (f"the phase {name!r} has taken more than {limit:.0f} s on rank {self._meeting.rank}; --phase-timeouts "
                f"{name}=SECONDS sets this limit")
        with self._limited(name, limit, text):
            if limit < math.inf:
                self._lines.send(0, "enters", limit, text)  # in case this process is stopped
            yield
        self._lines.send(0, "leaves phase")

    @contextmanager
    def _limited(self, phase: str, limit: float, lateness: str) -> Iterator[None]:
        assert not self._is_limited, f"{phase} begins within {self._phase}"
        self._is_limited, self._phase = True, phase
        self._set_limit(limit, lateness)
        if limit < math.inf:  # runs without the GIL, which the watching thread may not get
            faulthandler.dump_traceback_later(limit + 2 * _HUB_SECONDS, exit=True, file=_STANDARD_ERROR)
        try:
            yield
        finally:
            self._is_limited = False
            self._set_limit(math.inf, lateness)
            faulthandler.cancel_dump_traceback_later()
        self._phase = ""  # an error stays in its phase
        if self._journal is not None and (rest := self._phase_seconds["between"]):
            self._set_limit(rest, f"rank {self._meeting.rank} has been between two phases for more than {rest:.0f} s; "
                                  f"--phase-timeouts between=SECONDS sets this limit")

    def _set_limit(self, seconds: float, lateness: str) -> None:
        """Limit what this rank does from now on."""
        self._lateness, self._deadline = lateness, time.monotonic() + seconds

    def __enter__(self) -> "Watchdog":
        end_seconds, answer_seconds = (self._phase_seconds[name] or math.inf for name in ("between", "start"))
        joined = self._meeting.join(lambda: self.at_end(), end_seconds, answer_seconds)
        self._hub, self._lines, self._store = joined.hub, joined.lines, joined.store
        self._lines.send(0, "is process", *own_identity())
        if self._meeting.num_ranks > 1:
            self._lines.send(0, "is set up", socket.gethostname(), self._facts)
        self._thread.start()
        return self

    def __exit__(self, _: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._leave(error)
        finally:  # a process group that is alive when the interpreter exits aborts it
            self._journal = self._communicator = self.plan = self._mesh = self._store = None

    def _leave(self, error: BaseException | None) -> None:
        """Tell the hub how the run ended on this rank, and wait for what follows:

        1. A signal asked it to stop: the first rank to report this is the cause; raises StoppedRun.
        2. No error, an error that all ranks share, or an exit: report a normal end and wait for the other ranks.
        3. A UserError on this rank only: end all ranks with status 2; the caller prints it.
        4. Any other error: end all ranks; raises ReportedError.  If communication failed ("loses"), the hub first waits
           for a better cause from another rank.
        """
        if isinstance(error, KeyboardInterrupt):
            number = error.number if isinstance(error, Stopped) else signal.SIGINT
            self._fail("is interrupted", status_after(number))
            raise StoppedRun(number) from error
        is_agreed = isinstance(error, AgreedError) or (isinstance(error, UserError) and self._meeting.num_ranks == 1)
        self._deadline = math.inf
        is_over = error is None or is_agreed or not isinstance(error, Exception)
        if is_over:
            self._is_leaving = True
            self._lines.send(0, "leaves")
            limit = None if error is None else _HUB_SECONDS if is_agreed else 0.0
            self._thread.join(limit)
            if self._hub is not None:
                self._hub.join(limit)
            return
        defer_stopping()  # the launcher ends its ranks when one fails, but this one has to report why
        if isinstance(error, UserError):
            self._fail("fails", "", 2)
        else:
            name = f"rank {self._meeting.rank} failed with {type(error).__name__}: {error}"
            stack = "".join(traceback.format_exception(error))
            if isinstance(error, ConnectionError | dist.DistError) or (
                isinstance(error, RuntimeError) and _LOST.search(str(error))
            ):
                words = "loses", f"{name}\nNo rank gives a reason for its failure.\n{stack}"
            else:
                words = "fails", f"{name}\n{stack}", 1
            if self._fail(*words):
                raise ReportedError(name) from error

    def _fail(self, *words: str | int) -> bool:
        """Report to the hub and wait for its order to end, given because of this rank; False if no answer comes."""
        self._lines.send(0, *words)
        if not self._is_unwatched:
            self._ordered.wait(_HUB_SECONDS)
        if self._ordered.is_set() and self._cause_rank != self._meeting.rank:
            threading.Event().wait()  # another rank is the cause: the watching thread will end this process
        return self._ordered.is_set()

    def _watch(self) -> None:
        has_complained, last_place, rank = False, "", self._meeting.rank
        while not (self._is_unwatched and self._is_leaving):
            if (place := self._place()) != last_place:
                self._lines.send(0, "is at", last_place := place)
            until = self._deadline + (_SILENT_SECONDS if has_complained else 0.0)
            for _, words in self._lines.receive(min(_BEAT_SECONDS, max(0.0, until - time.monotonic()))):
                match words:
                    case ["begins"]:
                        self._begun.set()
                    case ["unwatched"]:
                        self._is_unwatched = True
                        self._begun.set()
                    case ["asks"]:
                        self._lines.send(0, "tells", self._place(), _stacks())
                    case ["is process", str(node), int(pid), str(start)]:
                        self._hub_process = (node, pid, start)
                    case ["ends", int(status), int(cause_rank), list(silent)]:
                        kill(map(tuple, silent))
                        self._end(status, cause_rank)
                    case None if self._is_leaving:
                        return
                    case None if not self._is_unwatched:
                        self._end(1, 0, f"error: {death_of(0)}\n{self._own_place()}" if rank == 1 else "")
            late = time.monotonic() - self._deadline
            if late > 0 and not has_complained:
                self._lines.send(0, "stalls", self._lateness)
                has_complained = True
            if late > _SILENT_SECONDS:
                kill([] if self._hub_process is None else [self._hub_process])
                self._end(1, 0, f"error: {self._lateness}, and rank 0 does not answer: it holds Python's GIL, or its "
                                f"process is stopped\n{self._own_place()}{_stacks()}")

    def _end(self, status: int, cause_rank: int, report: str = "") -> None:
        sys.stderr.write(printable(report))
        sys.stderr.flush()
        self._cause_rank = cause_rank
        self._ordered.set()
        end(status, self.at_end)

    def _own_place(self) -> str:
        return f"Where rank {self._meeting.rank} was (other ranks can only be asked by rank 0):\n  {self._place()}\n"

    def _place(self) -> str:
        """Where this rank is on the axes, and what it is doing, in words."""
        mesh, journal, plan = self._mesh, self._journal, self.plan
        if mesh is None:
            what = "creates its process groups" if self._begun.is_set() else "prepares, or waits for other ranks"
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
    """Limit of the next step in seconds: ``given`` by the user, or derived from the seconds ``taken`` by past steps."""
    if given == 0:
        return math.inf
    usual = max(USUAL_SECONDS, USUAL_FACTOR * statistics.median(taken or [0.0]))
    limit = usual if given is None else given
    return limit if taken else max(limit, FIRST_SECONDS)


def _stacks() -> str:
    """Stacks of all threads of this process except the hub's and the watchdog's."""
    frames = sys._current_frames()
    return "".join(f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
                   for thread in threading.enumerate() if thread.name not in _OWN_THREADS and thread.ident in frames)
