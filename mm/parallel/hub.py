"""A side channel beside the process groups: one hub that hears every rank, and ends all when one cannot go on.

It runs in a thread of rank 0.  Each rank keeps a connection open: one that is cut without a word is a rank that died.
What a rank says of itself, and when it complains, is in ``watchdog.py``.

A message is a line of JSON, a list that begins with a word.  To the hub: ``is at PLACE`` now and then, ``leaves`` at
the end, ``fails TEXT STATUS``, ``loses TEXT`` (an error that another rank's end may have caused), ``stalls TEXT``, and
``tells PLACE STACKS`` after the hub's ``asks``.  From the hub besides: ``ends STATUS RANK``, RANK being the cause.
"""

import json
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any

GRACE_SECONDS = 1.0
"""Between the order to end and a rank's exit: a launcher that waits for ranks must see the cause's exit first."""
_DOUBT_SECONDS = 1.0
"""How long a broken connection waits for the end of a rank that explains it."""
_ANSWER_SECONDS = 5.0
"""How long the hub waits for what ranks tell; one that holds Python's lock, or is stopped, tells nothing."""


class Lines:
    """Connections to other ranks.  Any thread may send; one receives."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[int, socket.socket] = {}
        self._halves: dict[int, bytes] = {}
        self._sending = Lock()

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._sockets))

    def __len__(self) -> int:
        return len(self._sockets)

    def add(self, rank: int, connection: socket.socket) -> None:
        self._sockets[rank], self._halves[rank] = connection, b""
        self._selector.register(connection, selectors.EVENT_READ, rank)

    def drop(self, rank: int) -> None:
        self._selector.unregister(self._sockets[rank])
        self._sockets.pop(rank).close()

    def send(self, rank: int, *words: Any) -> None:
        """A connection that is cut is noticed by ``receive``."""
        with self._sending, suppress(OSError, KeyError):
            self._sockets[rank].sendall(json.dumps(words).encode() + b"\n")

    def receive(self, seconds: float) -> list[tuple[int, list[Any] | None]]:
        """What has come from which rank, after a wait of at most ``seconds``; None for a connection that was cut."""
        found: list[tuple[int, list[Any] | None]] = []
        for key, _ in self._selector.select(seconds):
            try:
                data = self._sockets[key.data].recv(1 << 16)
            except OSError:
                data = b""
            *whole, self._halves[key.data] = (self._halves[key.data] + data).split(b"\n")
            found += [(key.data, json.loads(line)) for line in whole]
            if not data:
                self.drop(key.data)
                found.append((key.data, None))
        return found


@dataclass(frozen=True)
class Cause:
    """Why all ranks end."""

    rank: int
    text: str
    """What the hub prints; empty when the rank reports it itself."""
    status: int = 1
    is_riddle: bool = False
    """Whether it explains nothing by itself, so that the stacks of all ranks are wanted."""


class Hub:
    """Serves ``num_ranks`` ranks, this one among them, until all have left or one is the cause of an end."""

    def __init__(self, num_ranks: int, at_end: Callable[[], None]) -> None:
        """``at_end`` is called before the hub ends this process."""
        self._num_ranks, self._at_end = num_ranks, at_end
        is_dual = socket.has_dualstack_ipv6()
        self._server = socket.create_server(
            ("", 0), family=socket.AF_INET6 if is_dual else socket.AF_INET, dualstack_ipv6=is_dual, backlog=num_ranks)
        self.port: int = self._server.getsockname()[1]
        self.token = secrets.token_hex(16)
        """Without it nobody can join: the port is open to the network."""
        self._lines, self._places = Lines(), dict.fromkeys(range(num_ranks), "it has not said")
        self._thread = Thread(target=self._serve, name="hub", daemon=True)
        self._thread.start()

    def join(self, seconds: float | None = None) -> None:
        """Wait until all ranks have left."""
        self._thread.join(seconds)

    def _serve(self) -> None:
        while len(self._lines) < self._num_ranks:
            connection, _ = self._server.accept()
            with suppress(OSError, ValueError):
                connection.settimeout(_ANSWER_SECONDS)
                token, rank = connection.makefile("rb", buffering=0).readline(64).split()
                if secrets.compare_digest(token, self.token.encode()):
                    connection.settimeout(None)
                    self._lines.add(int(rank), connection)
        self._server.close()
        cause = self._wait_for_a_cause()
        if cause is not None:
            self._end(cause)

    def _wait_for_a_cause(self) -> Cause | None:
        """None when all ranks have left."""
        suspect, until = None, 0.0
        while self._lines:
            for rank, words in self._lines.receive(1.0 if suspect is None else max(0.0, until - time.monotonic())):
                match words:
                    case ["is at", place]:
                        self._places[rank] = place
                    case ["leaves"]:
                        self._lines.drop(rank)
                    case ["loses", text] if suspect is None:
                        suspect, until = Cause(rank, text, is_riddle=True), time.monotonic() + _DOUBT_SECONDS
                    case ["fails", text, status]:
                        return Cause(rank, text, status)
                    case ["stalls", text]:
                        return Cause(rank, text, is_riddle=True)
                    case None:
                        return Cause(rank, death_of(rank))
            if suspect is not None and time.monotonic() > until:
                return suspect
        return None

    def _end(self, cause: Cause) -> None:
        if cause.text:
            _write(f"error: {cause.text}\n")  # at once: a launcher that sees a rank's end soon ends this one
            stacks = self._ask()
            order = sorted(range(self._num_ranks), key=lambda rank: rank != cause.rank)
            places = "".join(f"  rank {rank}{'' if rank in stacks else ', when last heard'}, {self._places[rank]}\n"
                             for rank in order)
            _write(f"Where the ranks were:\n{places}")
            if cause.is_riddle:
                _write("".join(f"\nStacks of rank {rank}:\n{stacks[rank]}" for rank in sorted(stacks)))
        for rank in self._lines:
            self._lines.send(rank, "ends", cause.status, cause.rank)
        end(cause.status, self._at_end)

    def _ask(self) -> dict[int, str]:
        """The stacks of every rank that answers in time; brings the places up to date."""
        waiting, stacks, until = set(self._lines), {}, time.monotonic() + _ANSWER_SECONDS
        for rank in self._lines:
            self._lines.send(rank, "asks")
        while waiting and (left := until - time.monotonic()) > 0:
            for rank, words in self._lines.receive(left):
                match words:
                    case ["tells", place, text]:
                        self._places[rank], stacks[rank] = place, text
                        waiting.discard(rank)
                    case None:
                        waiting.discard(rank)
        for rank in waiting:
            self._places[rank] += " (and does not answer: it holds Python's lock, or its process is stopped)"
        return stacks


def end(status: int, at_end: Callable[[], None]) -> None:
    """End this process, whatever its other threads are stuck in, after the time that the launcher needs."""
    with suppress(Exception):  # nothing may keep it
        at_end()
    time.sleep(GRACE_SECONDS)
    os._exit(status)


def death_of(rank: int) -> str:
    """What a cut connection means."""
    return (f"rank {rank} died without a word: it was killed (is there memory left?) or crashed; the launcher and the "
            f"system's log know the signal")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def connect(host: str, port: int, token: str, rank: int) -> Lines:
    """A connection to the hub, which counts as rank 0's."""
    connection = socket.create_connection((host, port), timeout=60.0)
    connection.settimeout(None)
    connection.sendall(f"{token} {rank}\n".encode())
    lines = Lines()
    lines.add(0, connection)
    return lines
