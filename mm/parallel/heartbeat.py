"""A thread of each rank that tells the others where this rank is, and ends it when the run must end.

Ranks talk through keys of the launcher's store, over a connection that only this thread uses, so a main thread that is
stuck in a collective does not stop it.  In each beat a rank writes its record, and reads why the run ends (normally
nothing), the records of rank 0 and of its own node, and on rank 0 those of all ranks.  ``judge.py`` looks for a cause;
whoever finds one writes it with ``compare_set``, so that the first counts, and reports it:

1. It prints the cause.
2. Every rank adds its stacks to its record as soon as it sees that the run ends.  The reporter prints where the ranks
   were, the silent ones first.
3. It names the processes that do not answer, which any rank of their machine kills, and all ranks exit.

A beat costs three small requests per rank.  The time between beats grows with the number of ranks: 4,096 ranks make
3,000 requests a second, and rank 0 reads 1 MB every 4 seconds.

A request to a store whose process is stopped never returns.  So a second thread looks at the time limit, too.
"""

import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from mm.ending import leave
from mm.errors import UserError, printable
from mm.parallel.judge import Cause, Judge, Record, State, has_ended
from mm.parallel.ranks import death_of
from mm.parallel.rendezvous import END, NOTHING, OVER, Attempt, Rendezvous
from mm.process import Identity, kill, own_identity

GRACE_SECONDS = 1.0
"""Wait between the report and a rank's exit: the launcher must see the causing rank exit first."""
ANSWER_SECONDS = 5.0
"""How long the reporter waits for the other ranks' stacks; a rank that holds the GIL, or is stopped, gives none."""
_DOUBT_SECONDS = 5.0
_SOON_SECONDS = 0.1
"""Time between beats while this rank waits for the others."""
_STUCK_SECONDS = 10.0
"""How long after a limit the store may leave its rank without an answer."""
_LATE_SECONDS = 10.0
"""How long a rank 0 that serves the store stays for ranks that have not joined yet; without it they would look for its
store until their own time limit."""
_MAX_DIFFERENCES = 5
"""The largest number of differences between two ranks that a message names."""
_LEFT = "left"
"""The key that counts ranks which know that all have left."""
_SILENT = " does not answer: it holds Python's GIL, or its process is stopped"
_THREADS = ("heartbeat", "deadline")


class Heartbeat:
    """This rank's part.  The main thread sets the attributes and calls the methods; two other threads do the rest."""

    def __init__(
        self, rendezvous: Rendezvous, facts: Mapping[str, str], place: Callable[[], str], at_end: Callable[[], None],
        end_seconds: float,
    ) -> None:  # fmt: skip
        """Arguments:

        - ``facts``: what this rank runs and its settings by name, which must be those of rank 0
        - ``place``: where this rank is, in words
        - ``at_end``: called before this process is ended in the middle of its work
        - ``end_seconds``: how long ranks may take to leave after the first has left
        """
        self.deadline, self.lateness = float("inf"), ""
        """This rank's time limit, and what to report when it has passed."""
        self.attempt: Attempt | None = None
        """Set once this rank has joined the others."""
        self.problem: UserError | None = None
        """Why it cannot join them."""
        self.joined, self.begun, self.finished, self.ordered = (threading.Event() for _ in range(4))
        """Set when this rank has joined or cannot, when all ranks were ready, when all have left, and when this rank,
        which is the cause, must end."""
        self._rendezvous, self._facts, self._place, self._at_end = rendezvous, facts, place, at_end
        self._rank, self._num_ranks, self._process = rendezvous.rank, rendezvous.num_ranks, own_identity()
        self._all = tuple(range(self._num_ranks))
        self._reads = self._all if self._rank == 0 else tuple(sorted({0, *rendezvous.neighbours}))
        self._beat_seconds = max(1.0, self._num_ranks / 1000)
        self._soon_seconds = _SOON_SECONDS * max(1.0, self._num_ranks / 250)
        doubt = max(_DOUBT_SECONDS, 3 * self._beat_seconds)
        self._judge = Judge(self._rank, self._num_ranks, rendezvous.timeout.total_seconds(), end_seconds, doubt)
        self.state: State = "joined"
        self.lost = ""
        """See ``Record``."""
        self._count = 0
        self._cause: Cause | None = None
        """Why this rank ends all ranks."""
        self._end: Cause | None = None
        """Why all ranks end."""
        self._answered = time.monotonic()
        """When the store has last answered."""
        self._wake = threading.Event()
        for name, target in zip(_THREADS, (self._run, self._watch_deadline), strict=True):
            threading.Thread(target=target, name=name, daemon=True).start()

    def beat(self) -> None:
        """Beat now."""
        self._wake.set()

    def end_all(self, cause: Cause) -> None:
        """End all ranks, because of this one."""
        self._cause = cause
        self._wake.set()

    # In the thread "heartbeat"

    def _run(self) -> None:
        try:
            self._join()
            while not self._look():
                self._wake.wait(self._pause())
                self._wake.clear()
        except UserError as error:  # it cannot join
            self.problem = error
            for event in (self.joined, self.begun, self.finished):
                event.set()
        except dist.DistError:
            self._end_without_store()
        except Exception:
            _write(f"error: the heartbeat of rank {self._rank} has failed\n{traceback.format_exc()}")
            self._end_process(Cause(self._rank))

    def _join(self) -> None:
        store = self._rendezvous.open_store()
        if self._rank == 0:
            self.attempt = self._rendezvous.begin(store, self._facts)
        seconds, began = self._rendezvous.timeout.total_seconds(), time.monotonic()
        while self.attempt is None:
            if time.monotonic() > began + seconds:
                raise UserError(f"rank {self._rank} did not find rank 0 within {seconds / 60:g} minutes; see the "
                                f"output of rank 0's node")
            self.attempt = self._rendezvous.find(store, self._joining)
            time.sleep(self._soon_seconds)
        self._keys = PrefixStore(self.attempt.prefix, store)
        self.joined.set()

    def _joining(self, attempt: Attempt) -> str:
        """This rank's first record in ``attempt``: if it is set up otherwise than rank 0, it never says that it is
        ready, so nobody begins."""
        self._cause = self._cause or _difference(self._rank, self._facts, attempt)
        return self._written()

    def _look(self) -> bool:
        """One beat; whether it was the last."""
        assert self.attempt is not None, "it has joined"
        if self._rendezvous.serves and has_ended(self.attempt.process):
            raise dist.DistError("the store has ended with rank 0")
        self._keys.set(str(self._rank), self._written())
        end, records = self._read(self._reads)
        if end is None:
            if self.state == "ready" and self._rank == 0 and all(one.count and one.state != "joined"
                                                                 for one in records.values()):
                self.state = "begun"
                self._wake.set()
            if self._cause is None and (self if self._rank == 0 else records[0]).state in ("begun", "leaving"):
                self.begun.set()
            cause = self._judge.cause(records, time.monotonic()) or self._cause
            if cause is None and time.monotonic() > self.deadline:
                cause = Cause(self._rank, self.lateness, shows_stacks=True)
            if cause is None or (cause.status and self._read([cause.rank])[1][cause.rank].state == "leaving"):
                return False
            said = json.dumps(asdict(replace(cause, reporter=self._rank)))
            end = Cause(**json.loads(self._keys.compare_set(END, NOTHING, said)))
        self._obey(end)
        return True

    def _pause(self) -> float:
        waits = self.state == "leaving" or (self.state == "ready" and not self.begun.is_set())
        return min(self._soon_seconds if waits else self._beat_seconds, max(0.0, self.deadline - time.monotonic()))

    def _read(self, ranks: Iterable[int]) -> tuple[Cause | None, dict[int, Record]]:
        """Why all ranks end, and the records of these ranks."""
        end, *texts = (text.decode() for text in self._keys.multi_get([END, *map(str, ranks)]))
        self._answered = time.monotonic()
        records = [Record() if text == NOTHING else Record.read(text) for text in texts]
        return None if end == NOTHING else Cause(**json.loads(end)), dict(zip(ranks, records, strict=True))

    def _written(self, stacks: str | None = None) -> str:
        """This rank's record."""
        self._count += 1
        left = self.deadline - time.monotonic()
        state = self.state if self._cause is None else "joined"
        return Record(self._count, state, self._place(), None if left == float("inf") else left, self.lateness,
                      self.lost, self._process, stacks).text()

    def _obey(self, end: Cause) -> None:
        self._end = end
        if not end.status:
            self._keys.add(_LEFT, 1)
            until = time.monotonic() + _LATE_SECONDS
            while self._serves and self._keys.add(_LEFT, 0) < self._num_ranks and time.monotonic() < until:
                time.sleep(self._soon_seconds)
            self.finished.set()
            return
        self._keys.set(str(self._rank), self._written(_stacks()))
        kill(self._reported(end) if end.reporter == self._rank else self._awaited())
        if self._serves:
            self._wait_for_late()
        self._end_process(end)

    @property
    def _serves(self) -> bool:
        return self._rendezvous.serves and self._rank == 0

    def _reported(self, end: Cause) -> list[Identity]:
        """Report why and where all ranks end; returns the processes that do not answer."""
        if end.text:
            _write(f"error: {end.text}\n")  # first: a launcher that sees another rank exit soon ends this one
        silent: list[Identity] = []
        if end.text and end.status != 2:
            records = self._answers()
            are_silent = {rank: one.is_there and one.stacks is None and not has_ended(one.process)
                          for rank, one in records.items()}
            silent = [records[rank].process for rank, is_silent in are_silent.items() if is_silent]
            order = sorted(records, key=lambda rank: (not are_silent[rank], rank != end.rank, rank))
            _write("Where the ranks were:\n" + "".join(
                f"  rank {rank}, {'last known: ' if records[rank].stacks is None else ''}{records[rank].place}"
                f"{f' (and{_SILENT})' if are_silent[rank] else ''}\n" for rank in order))
            if end.shows_stacks:
                _write("".join(f"\nStacks of rank {rank}:\n{records[rank].stacks}"
                               for rank in sorted(records) if records[rank].stacks))
        self._keys.set(OVER, json.dumps(silent))
        return silent

    def _answers(self) -> dict[int, Record]:
        """The records of all ranks, with stacks of those that answer in time."""
        until = time.monotonic() + ANSWER_SECONDS + self._beat_seconds
        while True:
            _, records = self._read(self._all)
            waiting = [one for one in records.values() if one.is_there and one.stacks is None]
            if all(has_ended(one.process) for one in waiting) or time.monotonic() > until:
                return records
            time.sleep(self._soon_seconds)

    def _awaited(self) -> list[Identity]:
        """Wait for the report of another rank; returns what that does."""
        until = time.monotonic() + 2 * (ANSWER_SECONDS + self._beat_seconds)
        while (text := self._keys.get(OVER).decode()) == NOTHING and time.monotonic() < until:
            time.sleep(self._soon_seconds)
        return [] if text == NOTHING else [tuple(one) for one in json.loads(text)]

    def _wait_for_late(self) -> None:
        """Keep the store for ranks that have not read yet that the run ends."""
        until = time.monotonic() + _LATE_SECONDS
        while time.monotonic() < until and not all(one.count for one in self._read(self._all)[1].values()):
            time.sleep(self._soon_seconds)
        time.sleep(GRACE_SECONDS)

    def _end_without_store(self) -> None:
        if self._end is not None:
            self._end_process(self._end)
        if self.state == "leaving":
            self.finished.set()
            return
        serves = self._rendezvous.serves
        if self._rank == (1 if serves else min(self._rendezvous.neighbours, default=self._rank)):
            self._report_alone(death_of(0) if serves else
                               "the launcher's store has ended; see the output of rank 0's node")
        self._end_process(Cause(0))

    def _report_alone(self, why: str, stacks: str = "") -> None:
        _write(f"error: {why}\nWhere rank {self._rank} was (others cannot be asked without the store):\n  "
               f"{self._place()}\n{stacks}")

    def _end_process(self, end: Cause) -> None:
        """End this process whatever its other threads are stuck in, after ``GRACE_SECONDS``."""
        if end.rank == self._rank:
            self.ordered.set()
        for seconds in (GRACE_SECONDS, 0.0):  # twice: the main thread goes on, and may have locked something
            with suppress(Exception):  # nothing may keep the process alive
                self._at_end()
            time.sleep(seconds)
        leave(end.status)

    # In the thread "deadline"

    def _watch_deadline(self) -> None:
        while not self.finished.wait(1.0):
            now = time.monotonic()
            if self._end is None and now > max(self._answered, self.deadline) + _STUCK_SECONDS:
                self._end = Cause(0)
                who = "rank 0" if self._rendezvous.serves else "the launcher's store"
                self._report_alone(f"{self.lateness}, and {who}{_SILENT}", _stacks())
                if self._rendezvous.serves and self.attempt is not None:
                    kill([self.attempt.process])
                self._end_process(self._end)


def _difference(rank: int, facts: Mapping[str, str], attempt: Attempt) -> Cause | None:
    """The cause if this rank is set up differently from rank 0."""
    first = attempt.facts
    names = [name for name in {**first, **facts} if first.get(name) != facts.get(name)]
    if not names:
        return None
    shown = "; ".join(f"{name} is {facts.get(name)} instead of {first.get(name)}" for name in names[:_MAX_DIFFERENCES])
    more = f"; and {len(names) - _MAX_DIFFERENCES} others" if len(names) > _MAX_DIFFERENCES else ""
    return Cause(rank, f"rank {rank} on {socket.gethostname()} differs from rank 0 on {attempt.host}: {shown}{more}. "
                       f"Give every machine the same packages, code, flags and JSON files, and start again.",
                 status=2)


def _stacks() -> str:
    """Stacks of all threads of this process except those of the heartbeat."""
    frames = sys._current_frames()
    return "".join(f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
                   for thread in threading.enumerate() if thread.name not in _THREADS and thread.ident in frames)


def _write(text: str) -> None:
    sys.stderr.write(printable(text))
    sys.stderr.flush()
