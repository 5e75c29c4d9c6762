"""A side channel beside the process groups: a hub that every rank is connected to, and that ends all ranks when one
cannot go on.

It runs in a thread of rank 0.  Each rank connects before the first process group is made and keeps the connection open;
a connection that closes without ``leaves`` means that the rank died.  What ranks send, and when, is in ``watchdog.py``.

Rank to hub:

- ``joins TOKEN RANK``: answered with ``welcome``
- ``is process NODE PID BEGAN``: its ``node.Identity``; answered with the hub's own
- ``is set up HOST FACTS``: its software and settings, which must be those of rank 0
- ``ready``: answered with ``begins`` once all ranks are ready
- ``is at PLACE``: whenever it changes
- ``enters SECONDS TEXT``, ``leaves phase``: a phase with its time limit, and what to report after it, for a rank that
  cannot report it itself
- ``leaves``: normal end
- ``is interrupted STATUS``, ``fails TEXT STATUS``, ``stalls TEXT``: reasons to end all ranks
- ``loses TEXT``: an error that another rank's death may have caused
- ``tells PLACE STACKS``: the answer to ``asks``

Hub to rank: ``welcome``, ``is process``, ``begins``, ``asks``, ``ends STATUS RANK SILENT`` (RANK is the cause, SILENT
the processes that do not answer, which any rank of their machine kills), and ``unwatched`` when the hub itself has
failed.
"""

import resource
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

from mm.ending import leave
from mm.errors import printable
from mm.parallel.door import LOOPBACK, allow_open_files, open_door
from mm.parallel.lines import Lines
from mm.parallel.node import Identity, kill, own_identity
from mm.parallel.ranks import death_of, ranks_text

GRACE_SECONDS = 1.0
"""Wait between the order to end and a rank's exit: the launcher must see the causing rank exit first."""
_DOUBT_SECONDS = 1.0
"""After a rank reports a broken connection, how long the hub waits for the death of a rank that explains it."""
_ANSWER_SECONDS = 5.0
"""How long the hub waits for answers to ``asks``; a rank that holds the GIL, or is stopped, does not answer."""
_LATE_SECONDS = 10.0
"""When a run ends before all ranks have joined, how long the hub stays to end late ranks too.  Without this they would
look for a store that is gone until their own time limit.  torch's store client retries after half a second, then less
and less often."""
_LATE_SECONDS_OF_STOP = 2.0
"""The same for ranks that have had their time to join, and after a signal: a launcher sends it to all ranks when one
has died, and those that have not joined end by it."""
_GRACE_OF_PHASE = 1.0
"""Seconds after a phase's limit in which its rank may report that itself; then the hub does."""
_MAX_DIFFERENCES = 5
"""The largest number of differences between two ranks that a message names."""


@dataclass(frozen=True)
class Cause:
    """Why all ranks end."""

    rank: int
    text: str
    """What the hub prints; empty when the rank reports it itself."""
    status: int = 1
    is_riddle: bool = False
    """The text alone does not explain it, so the report shows the stacks of all ranks."""
    is_mistake: bool = False
    """A user's mistake, which the text explains: the report leaves out where the ranks were."""


class Hub:
    """Serves ``num_ranks`` ranks, including this one, until all have left or one of them ends the run."""

    def __init__(
        self, num_ranks: int, start_seconds: float, at_end: Callable[[], None] = lambda: None,
        end_seconds: float = float("inf"), address: str | None = LOOPBACK,
    ) -> None:  # fmt: skip
        """Arguments:

        - ``start_seconds``: how long other ranks may take to be ready after this one is
        - ``at_end``: called before the hub ends this process
        - ``end_seconds``: how long ranks may take to end after the first has
        - ``address``: where the hub listens, one of this machine's IP addresses; None: at all of them
        """
        self._num_ranks, self._start_seconds, self._at_end = num_ranks, start_seconds, at_end
        self._end_seconds = end_seconds
        door = open_door(address, num_ranks)
        self.address, self.port = address or "localhost", int(door.getsockname()[1])
        """Where it listens; "localhost" where it does so at all addresses."""
        self.token = secrets.token_hex(16)
        """Required to join: other users of this machine, or the network, may connect to the port."""
        self.problems = allow_open_files(num_ranks)
        self._lines, self._places = Lines(door), dict.fromkeys(range(num_ranks), "unknown")
        self._processes: dict[int, Identity] = {}
        self._phases: dict[int, tuple[float, str]] = {}
        """By rank: when its phase must have ended, and what to report if it has not."""
        self._setups: dict[int, tuple[str, Mapping[str, Any]]] = {}
        """Host and facts of rank 0, and until they are known those of the others."""
        self._joined: set[int] = set()
        self._ready: set[int] = set()
        self._left: set[int] = set()
        self._start_ends = self._end_ends = float("inf")
        self._has_complained = False
        self._is_interrupted = False
        """Whether a signal asks a rank to stop, perhaps because another has ended."""
        self._thread = Thread(target=self._serve, name="hub", daemon=True)
        self._thread.start()

    def join(self, seconds: float | None = None) -> None:
        """Wait until all ranks have left."""
        self._thread.join(seconds)

    def _serve(self) -> None:
        try:
            cause = self._wait_for_a_cause()
            if cause is not None:
                self._end(cause)
        except Exception:
            _write("warning: the hub of rank 0 has failed, so ranks are no longer watched.  If one dies or stalls, the "
                   f"others wait until their messages time out.\n{traceback.format_exc()}")
            for rank in self._lines.ranks:
                self._lines.send(rank, "unwatched")
        finally:
            self._lines.close()

    def _wait_for_a_cause(self) -> Cause | None:
        """The reason to end all ranks; None when all have left normally."""
        suspect, until = None, 0.0
        while len(self._left) < self._num_ranks:
            for rank, words in self._lines.receive(1.0 if suspect is None else max(0.0, until - time.monotonic())):
                match words:
                    case None if rank >= 0:
                        return Cause(rank, death_of(rank))
                    case ["joins", str(token), int(joining)] if rank < 0 and self._may_join(token, joining):
                        self._let_in(rank, joining)
                    case _ if rank < 0:
                        self._lines.drop(rank)  # a stranger
                    case ["is process", str(node), int(pid), str(start)]:
                        self._processes[rank] = (node, pid, start)
                        self._lines.send(rank, "is process", *own_identity())
                    case ["is set up", str(host), dict(facts)]:
                        if (cause := self._note_setup(rank, host, facts)) is not None:
                            return cause
                    case ["ready"]:
                        self._note_ready(rank)
                    case ["is at", str(place)]:
                        self._places[rank] = place
                    case ["enters", int() | float() as seconds, str(text)]:
                        self._phases[rank] = (time.monotonic() + seconds + _GRACE_OF_PHASE, text)
                    case ["leaves phase"]:
                        self._phases.pop(rank, None)
                    case ["leaves"]:
                        self._left.add(rank)
                        self._end_ends = min(self._end_ends, time.monotonic() + self._end_seconds)
                        self._lines.drop(rank)
                    case ["is interrupted", int(status)]:
                        self._is_interrupted = True
                        return Cause(rank, "", status)
                    case ["loses", str(text)]:
                        if suspect is None:
                            suspect, until = Cause(rank, text, is_riddle=True), time.monotonic() + _DOUBT_SECONDS
                    case ["fails", str(text), int(status)]:
                        return Cause(rank, text, status)
                    case ["stalls", str(text)]:
                        return Cause(rank, text, is_riddle=True)
                    case _:
                        _write(f"warning: the hub ignores a message of rank {rank} that it does not understand: "
                               f"{str(words)[:200]}\n")
            if suspect is not None and time.monotonic() > until:
                return suspect
            self._complain()
            if time.monotonic() > self._start_ends:
                return self._absence()
            for rank, (deadline, text) in self._phases.items():
                if time.monotonic() > deadline and rank not in self._left:
                    return Cause(rank, text, is_riddle=True)
            if time.monotonic() > self._end_ends:
                late = [rank for rank in range(self._num_ranks) if rank not in self._left]
                return Cause(late[0], f"{ranks_text(late)} did not end within {self._end_seconds:.0f} s after the "
                                      f"first; --phase-timeouts between=SECONDS sets this limit", is_riddle=True)
        return None

    def _may_join(self, token: str, rank: int) -> bool:
        is_free = 0 <= rank < self._num_ranks and rank not in self._left and rank not in self._lines.ranks
        given = token.encode(errors="surrogatepass")  # JSON may contain half of a surrogate pair
        return is_free and secrets.compare_digest(given, self.token.encode())

    def _let_in(self, caller: int, rank: int) -> None:
        self._lines.rename(caller, rank)
        self._lines.send(rank, "welcome")
        self._joined.add(rank)

    def _note_setup(self, rank: int, host: str, facts: Mapping[str, Any]) -> Cause | None:
        """The cause if a rank is set up differently from rank 0."""
        self._setups[rank] = host, facts
        if 0 not in self._setups:
            return None
        others = {one: self._setups.pop(one) for one in list(self._setups) if one != 0}
        for other, (its_host, its_facts) in others.items():
            first_host, first_facts = self._setups[0]
            names = [name for name in {**first_facts, **its_facts} if first_facts.get(name) != its_facts.get(name)]
            if names:
                shown = "; ".join(f"{name} is {its_facts.get(name)} instead of {first_facts.get(name)}"
                                  for name in names[:_MAX_DIFFERENCES])
                more = f"; and {len(names) - _MAX_DIFFERENCES} others" if len(names) > _MAX_DIFFERENCES else ""
                return Cause(other, f"rank {other} on {its_host} differs from rank 0 on {first_host}: {shown}{more}. "
                                    f"Give every machine the same packages, code, flags and JSON files, and start "
                                    f"again.", status=2, is_mistake=True)
        return None

    def _note_ready(self, rank: int) -> None:
        self._ready.add(rank)
        if rank == 0:
            self._start_ends = time.monotonic() + self._start_seconds
        if len(self._ready) == self._num_ranks:
            self._start_ends = float("inf")
            for one in self._lines.ranks:
                self._lines.send(one, "begins")

    def _absence(self) -> Cause:
        """The cause when ranks were not ready in time."""
        missing = [rank for rank in range(self._num_ranks) if rank not in self._ready]
        reason = "" if self._lines.refusal is None else f" ({_no_way_in(self._lines.refusal)})"
        return Cause(missing[0], f"{ranks_text(missing)} of {self._num_ranks} did not connect within "
                                 f"{self._start_seconds / 60:g} minutes after rank 0{reason}; see the output of their "
                                 f"launchers, and --distributed-timeout-minutes")

    def _complain(self) -> None:
        """Warn once when a rank that connects cannot be accepted (this is retried), and note when it works again."""
        if self._lines.refusal is not None and not self._has_complained:
            self._has_complained = True
            absent = self._num_ranks - len(self._lines.ranks) - len(self._left)
            _write(f"warning: {_no_way_in(self._lines.refusal)}; {absent} of {self._num_ranks} ranks are not watched "
                   f"and wait for a connection\n")
        elif self._lines.refusal is None and self._has_complained:
            self._has_complained = False
            _write("note: the hub of rank 0 accepts connections again\n")

    def _end(self, cause: Cause) -> None:
        silent: list[Identity] = []
        if cause.text:
            _write(f"error: {cause.text}\n")  # first: a launcher that sees another rank exit soon ends this one
        if cause.text and not cause.is_mistake:
            stacks = self._ask()
            is_silent = {rank: rank in self._lines.ranks and rank not in stacks for rank in range(self._num_ranks)}
            silent = [process for rank, process in self._processes.items() if is_silent[rank]]
            order = sorted(range(self._num_ranks), key=lambda rank: (not is_silent[rank], rank != cause.rank))
            places = "".join(f"  rank {rank}, {'' if rank in stacks else 'last known: '}{self._places[rank]}\n"
                             for rank in order)
            _write(f"Where the ranks were:\n{places}")
            if cause.is_riddle:
                _write("".join(f"\nStacks of rank {rank}:\n{stacks[rank]}" for rank in sorted(stacks)))
        for rank in self._lines.ranks:
            if rank != 0:
                self._lines.send(rank, "ends", cause.status, cause.rank, silent)
        self._end_late_ranks(cause)
        self._lines.send(0, "ends", cause.status, cause.rank, silent)  # last: this process runs the hub and the store
        kill(silent)  # rank 0 may have left
        end(cause.status, self._at_end)

    def _end_late_ranks(self, cause: Cause) -> None:
        """Wait a little for ranks that have not joined yet, and end each as it joins."""
        began = time.monotonic()
        while len(self._joined) < self._num_ranks:
            is_short = self._is_interrupted or began > self._start_ends
            left = began + (_LATE_SECONDS_OF_STOP if is_short else _LATE_SECONDS) - time.monotonic()
            if left <= 0:
                return
            for rank, words in self._lines.receive(left):
                match words:
                    case ["joins", str(token), int(joining)] if rank < 0 and self._may_join(token, joining):
                        self._let_in(rank, joining)
                        self._lines.send(joining, "ends", cause.status, cause.rank, [])
                    case ["is interrupted", int()] if rank >= 0:
                        self._is_interrupted = True
                    case _ if rank < 0:
                        self._lines.drop(rank)  # a stranger

    def _ask(self) -> dict[int, str]:
        """Ask every rank where it is, also those that join meanwhile, and update their places; return the stacks of
        those that answer in time."""
        waiting, stacks, until = set(self._lines.ranks), dict[int, str](), time.monotonic() + _ANSWER_SECONDS
        for rank in waiting:
            self._lines.send(rank, "asks")
        while waiting and (left := until - time.monotonic()) > 0:
            for rank, words in self._lines.receive(left):
                match words:
                    case ["joins", str(token), int(joining)] if rank < 0 and self._may_join(token, joining):
                        self._let_in(rank, joining)
                        self._lines.send(joining, "asks")
                        waiting.add(joining)
                    case _ if rank < 0:
                        self._lines.drop(rank)  # a stranger
                    case ["tells", str(place), str(text)]:
                        self._places[rank], stacks[rank] = place, text
                        waiting.discard(rank)
                    case ["is interrupted", int()]:
                        self._is_interrupted = True
                    case None:
                        waiting.discard(rank)
        for rank in waiting:
            self._places[rank] += " (and does not answer: it holds Python's GIL, or its process is stopped)"
        return stacks


def end(status: int, at_end: Callable[[], None]) -> None:
    """End this process whatever its other threads are stuck in, after ``GRACE_SECONDS``."""
    for seconds in (GRACE_SECONDS, 0.0):  # twice: the main thread goes on, and may have locked something
        with suppress(Exception):  # nothing may keep the process alive
            at_end()
        time.sleep(seconds)
    leave(status)


def _no_way_in(error: OSError) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"the hub of rank 0 cannot accept connections: {error.strerror} (ulimit -n is {soft})"


def _write(text: str) -> None:
    sys.stderr.write(printable(text))
    sys.stderr.flush()
