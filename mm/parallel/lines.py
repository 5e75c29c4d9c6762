"""Connections that carry messages: each is one line of JSON, a list whose first element is a word."""

import json
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from mm.files import json_value

JOIN_SECONDS = 60.0
"""How long a newcomer waits for the first answer; the other side may be busy with thousands of newcomers.  A process
that has ended costs no wait: its machine refuses the connection immediately."""
_PAUSE_SECONDS = 0.5
"""Wait between attempts to accept a newcomer after one has failed."""
_MAX_NEWCOMER_BYTES = 1024
_DOOR = "door"
_IDLE_SECONDS = 60
"""Idle time after which the kernel probes whether the other end is still there (TCP keepalive)."""


class Lines:
    """Connections to other ranks.  Any thread may send; one receives.

    A connection accepted at ``door``, a listening socket, has a negative number until ``rename`` gives it a rank.
    """

    def __init__(self, door: socket.socket | None = None) -> None:
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[int, socket.socket] = {}
        self._halves: dict[int, bytes] = {}
        self._sending = Lock()
        self._door, self._num_newcomers = door, 0
        self._leaves_at: dict[int, float] = {}
        """When each newcomer is dropped, unless it has a rank by then."""
        self._opens_at: float | None = 0.0
        """When the door opens again; None while it is open."""
        self.refusal: OSError | None = None
        """Why the latest newcomer could not be accepted (it stays in the backlog); None if it was accepted."""

    @property
    def ranks(self) -> Sequence[int]:
        """The connected ranks, without newcomers."""
        return tuple(rank for rank in tuple(self._sockets) if rank >= 0)

    def add(self, rank: int, connection: socket.socket) -> None:
        self._sockets[rank], self._halves[rank] = connection, b""
        self._selector.register(connection, selectors.EVENT_READ, rank)

    def rename(self, newcomer: int, rank: int) -> None:
        """Give a newcomer its rank."""
        connection = self._sockets.pop(newcomer)
        self._selector.unregister(connection)
        del self._halves[newcomer], self._leaves_at[newcomer]
        self.add(rank, connection)

    def drop(self, rank: int) -> None:
        """Close a connection, if it is still there."""
        connection = self._sockets.pop(rank, None)
        if connection is not None:
            self._selector.unregister(connection)
            self._leaves_at.pop(rank, None)
            del self._halves[rank]
            connection.close()

    def close(self) -> None:
        """Close the door and every connection."""
        for rank in tuple(self._sockets):
            self.drop(rank)
        if self._door is not None:
            self._shut()
            self._door.close()
            self._door = None

    def send(self, rank: int, *words: Any) -> None:
        """Send one message.  A broken connection is ignored here and reported by ``receive``."""
        with self._sending, suppress(OSError, KeyError):
            self._sockets[rank].sendall(json.dumps(words).encode() + b"\n")

    def receive(self, seconds: float) -> list[tuple[int, Any]]:
        """(rank or newcomer, message) pairs that have arrived, after a wait of at most ``seconds``.

        A message is a list of words, None if the connection was closed, or bytes if the line is not a message.
        """
        now = time.monotonic()
        for newcomer in [one for one, until in self._leaves_at.items() if until < now]:
            self.drop(newcomer)
        if self._door is not None and self._opens_at is not None:
            if self._opens_at <= now:
                self._selector.register(self._door, selectors.EVENT_READ, _DOOR)
                self._opens_at = None
            else:
                seconds = min(seconds, self._opens_at - now)
        found: list[tuple[int, Any]] = []
        for key, _ in self._selector.select(seconds):
            if key.data == _DOOR:
                self._let_in()
            else:
                found += self._read(key.data)
        return found

    def _shut(self) -> None:
        if self._door is not None and self._opens_at is None:
            self._selector.unregister(self._door)
            self._opens_at = time.monotonic() + _PAUSE_SECONDS

    def _let_in(self) -> None:
        assert self._door is not None, "it is open"
        try:
            connection, _ = self._door.accept()
        except OSError as error:  # most likely the limit on open files
            self.refusal = error
            self._shut()  # an open door would wake ``select`` again and again
            return
        self.refusal = None
        _keep_alive(connection)
        self._num_newcomers += 1
        self._leaves_at[-self._num_newcomers] = time.monotonic() + JOIN_SECONDS
        self.add(-self._num_newcomers, connection)

    def _read(self, rank: int) -> list[tuple[int, Any]]:
        try:
            data = self._sockets[rank].recv(1 << 16)
        except OSError:
            data = b""
        *whole, rest = (self._halves[rank] + data).split(b"\n")
        self._halves[rank] = rest
        found: list[tuple[int, Any]] = [(rank, _message(line)) for line in whole]
        if not data or (rank < 0 and len(rest) > _MAX_NEWCOMER_BYTES):
            self.drop(rank)
            found.append((rank, None))
        return found


def _message(line: bytes) -> list[Any] | bytes:
    try:
        words = json_value(line)
    except ValueError:
        return line
    return words if isinstance(words, list) and words else line


def _keep_alive(connection: socket.socket) -> None:
    """Probe an idle connection: firewalls drop those without traffic, and a machine that loses power closes none."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)


def call(host: str, port: int, rank: int, *words: Any, seconds: float = JOIN_SECONDS) -> Lines:
    """Connect to a listener, send ``words`` and wait for ``welcome``; return the connection under the number ``rank``.

    Raises TimeoutError if no answer comes within ``seconds``, and another OSError if nobody listens there or the answer
    is something else.
    """
    connection = socket.create_connection((host, port), timeout=seconds)
    try:
        _keep_alive(connection)
        connection.sendall(json.dumps(words).encode() + b"\n")
        answer = connection.makefile("rb", buffering=0).readline(64)
        if answer != b'["welcome"]\n':
            raise ConnectionError(f"{host}:{port} answers {answer!r}")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    lines = Lines()
    lines.add(rank, connection)
    return lines
