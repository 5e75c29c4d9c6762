"""A thread of each rank that tells the others where this rank is, and ends it when the run must end.

Ranks talk through keys of the launcher's store, over a connection that only this thread uses, so a main thread that is
stuck in a collective does not stop it.  In each beat a rank writes its record, and reads why the run ends (normally
nothing), the records of rank 0 and of its own node, and on rank 0 those of all ranks.  ``Judge`` looks for a cause;
whoever finds one writes it with ``compare_set``, so that the first counts, and reports it:

1. It prints the cause.
2. Every rank adds its stacks to its record as soon as it sees that the run ends.  The reporter prints where the ranks
   were, the silent ones first.
3. It names the processes that do not answer, which any rank of their machine kills, and all ranks exit.

The time between beats grows with the number of ranks: 4,096 ranks make 3,000 requests a second, and rank 0 reads 1 MB
every 4 seconds.
"""

import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from mm.errors import UserError, printable
from mm.parallel.health.rendezvous import END, NOTHING, OVER, Attempt, Rendezvous
from mm.process import Identity, has_ended, kill, leave, own_identity

SILENT_SECONDS = 300.0
"""How long a rank may give no sign of life if no time limit has passed: Python's GIL may be held for minutes."""
GRACE_SECONDS = 1.0
"""Wait between the report and a rank's exit: the launcher must see the causing rank exit first."""
ANSWER_SECONDS = 5.0
"""How long the reporter waits for the other ranks' stacks; a rank that holds the GIL, or is stopped, gives none."""
_LATE_SECONDS = 10.0
"""How long rank 0, which may serve the store, stays for ranks that have not joined yet to read that the run ends."""
_DOUBT_SECONDS = 5.0
"""How long an error of communication waits for the death or silence that explains it."""
_LIMIT_SECONDS = 3.0
"""After a limit, its rank has this time to report that itself."""
_SOON_SECONDS = 0.1
"""Time between beats while this rank waits for the others."""
_MAX_DIFFERENCES = 5
"""The largest number of differences between two ranks that a message names."""


@dataclass(frozen=True)
class Cause:
    """Why all ranks end."""

    rank: int
    text: str = ""
    """What is printed; empty when the rank reports it itself."""
    status: int = 1
    """0: all ranks have left normally; 2: a user's mistake, so the report leaves out where the ranks were."""
    shows_stacks: bool = False
    reporter: int = -1
    """The rank that has found it."""


State = Literal["joined", "ready", "begun", "leaving"]
"""What a rank has reached; "ready": it waits for the others; "begun", on rank 0: all were ready; "leaving": its part
has ended."""


@dataclass(frozen=True)
class Record:
    """What a rank says about itself."""

    count: int = 0
    """How many records it has written; 0: it has not joined yet."""
    state: State = "joined"
    place: str = "has not joined the others"
    seconds_left: float | None = None
    lateness: str = ""
    lost: str = ""
    """An error that another rank's death may have caused."""
    process: Identity = ("", 0, "")
    stacks: str | None = None
    """Once it has been told that the run ends."""

    @property
    def is_there(self) -> bool:
        return self.count > 0 and self.state != "leaving"

    @classmethod
    def read(cls, text: str) -> "Record":
        found = json.loads(text)
        return cls(**found | {"process": tuple(found["process"])})

    def text(self) -> str:
        return json.dumps(asdict(self))


class Judge:
    """Decides from records whether all ranks must end, and why.  Knows no store."""

    def __init__(
        self, rank: int, num_ranks: int, start_seconds: float, end_seconds: float, doubt_seconds: float
    ) -> None:
        """``start_seconds``: how long other ranks may take to be ready after rank 0 is; ``end_seconds``: to leave after
        the first has left; ``doubt_seconds``: see ``_DOUBT_SECONDS``."""
        self._rank, self._num_ranks = rank, num_ranks
        self._start_seconds, self._end_seconds, self._doubt_seconds = start_seconds, end_seconds, doubt_seconds
        self._changed: dict[int, tuple[int, float]] = {}
        """By rank: its latest count, and when that was new."""
        self._since: dict[str, float] = {}

    def cause(self, records: Mapping[int, Record], now: float) -> Cause | None:
        for rank, record in records.items():
            if self._changed.get(rank, (-1, 0.0))[0] != record.count:
                self._changed[rank] = record.count, now
        there = {rank: record for rank, record in records.items() if record.is_there}
        return self._death(there) or self._loss(there, now) or self._silence(there, now) or (
            self._absence(records, now) or self._late_end(records, now) if self._rank == 0 else None)

    def _death(self, there: Mapping[int, Record]) -> Cause | None:
        return next((Cause(rank, f"rank {rank} died without an error message: it crashed or was killed (out of "
                                 f"memory?); the launcher and the system log show the signal")
                     for rank, record in there.items() if has_ended(record.process)), None)

    def _loss(self, there: Mapping[int, Record], now: float) -> Cause | None:
        """A rank whose communication has failed; rather one that has been silent since then."""
        lost = {rank: record.lost for rank, record in there.items() if record.lost}
        if not lost or now < self._since.setdefault("loss", now) + self._doubt_seconds:
            return None
        silent = [rank for rank in there if now - self._changed[rank][1] > 0.9 * self._doubt_seconds]
        if silent:
            return Cause(silent[0], f"{ranks_text(silent)} gave no sign of life for {self._doubt_seconds:.0f} s after "
                                    f"{lost[min(lost)]}", shows_stacks=True)
        if self._rank == 0:  # it knows of all ranks
            return Cause(min(lost), f"{lost[min(lost)]}\nNo rank gives a reason for its failure.", shows_stacks=True)
        return None

    def _silence(self, there: Mapping[int, Record], now: float) -> Cause | None:
        """A rank that has passed its limit and cannot say so itself, or is silent for long."""
        for rank, record in there.items():
            silent = now - self._changed[rank][1]
            if record.seconds_left is not None and silent > record.seconds_left + _LIMIT_SECONDS:
                return Cause(rank, record.lateness, shows_stacks=True)
            if silent > SILENT_SECONDS:
                return Cause(rank, f"rank {rank} has given no sign of life for {silent:.0f} s", shows_stacks=True)
        return None

    def _absence(self, records: Mapping[int, Record], now: float) -> Cause | None:
        missing = _not_in(records, ("ready", "begun", "leaving"))
        if 0 in missing or not missing or now < self._since.setdefault("ready", now) + self._start_seconds:
            return None
        return Cause(missing[0], f"{ranks_text(missing)} of {self._num_ranks} did not connect within "
                                 f"{self._start_seconds / 60:g} minutes after rank 0; see the output of their "
                                 f"launchers, and --distributed-timeout-minutes")

    def _late_end(self, records: Mapping[int, Record], now: float) -> Cause | None:
        late = _not_in(records, ("leaving",))
        if not late:
            return Cause(0, status=0)
        if len(late) == self._num_ranks or now < self._since.setdefault("end", now) + self._end_seconds:
            return None
        return Cause(late[0], f"{ranks_text(late)} did not end within {self._end_seconds:.0f} s after the first; "
                              f"--phase-timeouts between=SECONDS sets this limit", shows_stacks=True)


def _not_in(records: Mapping[int, Record], states: Sequence[str]) -> list[int]:
    return [rank for rank, record in sorted(records.items()) if not record.count or record.state not in states]


def ranks_text(ranks: Sequence[int]) -> str:
    """Ascending ranks as text, such as ``ranks 1, 4 to 7``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(' to '.join(map(str, span)) for span in spans)}"


class Heartbeat:
    """This rank's part.  The main thread sets the attributes and calls the methods; the other thread does the rest."""

    def __init__(
        self, rendezvous: Rendezvous, facts: Mapping[str, str], place: Callable[[], str], at_end: Callable[[], None],
        end_seconds: float,
    ) -> None:  # fmt: skip
        """``facts``: what this rank runs and its settings by name, which must be those of rank 0.  ``place``: where it
        is, in words.  ``at_end``: called before this process is ended in the middle of its work.  ``end_seconds``: how
        long ranks may take to leave after the first has left."""
        self.deadline, self.lateness = float("inf"), ""
        """This rank's time limit, and what to report when it has passed."""
        self.state: State = "joined"
        self.lost = ""
        self.attempt: Attempt | None = None
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
        self._judge = Judge(self._rank, self._num_ranks, rendezvous.timeout.total_seconds(), end_seconds,
                            max(_DOUBT_SECONDS, 3 * self._beat_seconds))
        self._count = 0
        self._cause: Cause | None = None
        self._wake = threading.Event()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def beat(self) -> None:
        self._wake.set()

    def end_all(self, cause: Cause) -> None:
        self._cause = cause
        self._wake.set()

    # In the thread

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
        return self._record().text()

    def _look(self) -> bool:
        """One beat; whether it was the last."""
        self._keys.set(str(self._rank), self._record().text())
        end, records = self._read(self._reads)
        if end is None:
            if self.state == "ready" and self._rank == 0 and not _not_in(records, ("ready", "leaving")):
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
        end, *texts = (text.decode() for text in self._keys.multi_get([END, *map(str, ranks)]))
        records = [Record() if text == NOTHING else Record.read(text) for text in texts]
        return None if end == NOTHING else Cause(**json.loads(end)), dict(zip(ranks, records, strict=True))

    def _record(self, stacks: str | None = None) -> Record:
        self._count += 1
        left = self.deadline - time.monotonic()
        return Record(self._count, self.state if self._cause is None else "joined", self._place(),
                      None if left == float("inf") else left, self.lateness, self.lost, self._process, stacks)

    def _obey(self, end: Cause) -> None:
        if not end.status:
            if self._rank == 0:
                time.sleep(2 * self._soon_seconds)  # it may serve the store, in which the others read this
            self.finished.set()
            return
        self._keys.set(str(self._rank), self._record(_stacks()).text())
        kill(self._reported(end) if end.reporter == self._rank else self._awaited())
        if self._rank == 0:
            until = time.monotonic() + _LATE_SECONDS
            while time.monotonic() < until and not all(one.count for one in self._read(self._all)[1].values()):
                time.sleep(self._soon_seconds)
            self._answers()  # it may serve the store, in which the others read the end
        self._end_process(end)

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
            why = " (and does not answer: it holds Python's GIL, or its process is stopped)"
            _write("Where the ranks were:\n" + "".join(
                f"  rank {rank}, {'last known: ' if records[rank].stacks is None else ''}{records[rank].place}"
                f"{why if are_silent[rank] else ''}\n" for rank in order))
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

    def _end_without_store(self) -> None:
        """The process that serves the store has ended: rank 0, or the launcher of its node."""
        if self.state == "leaving":
            self.finished.set()
            return
        if self._rank == min(self._rendezvous.neighbours, default=self._rank):
            _write(f"error: the store of the ranks has ended, because rank 0 or the launcher of its node has died; see "
                   f"the output of that node\nRank {self._rank} was at: {self._place()}\n")
        self._end_process(Cause(0))

    def _end_process(self, end: Cause) -> None:
        """End this process, whatever its other threads are stuck in."""
        if end.rank == self._rank:
            self.ordered.set()
        time.sleep(GRACE_SECONDS)
        with suppress(Exception):  # nothing may keep the process alive
            self._at_end()
        leave(end.status)


def _difference(rank: int, facts: Mapping[str, str], attempt: Attempt) -> Cause | None:
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
    frames = sys._current_frames()
    return "".join(f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
                   for thread in threading.enumerate()
                   if thread is not threading.current_thread() and thread.ident in frames)


def _write(text: str) -> None:
    sys.stderr.write(printable(text))
    sys.stderr.flush()
