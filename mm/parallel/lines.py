"""Connections on which a message is a line of JSON, a list that begins with a word.  Its meaning is not known here."""

import json
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

JOIN_SECONDS = 60.0
"""How long a newcomer waits for the first word from whom it calls, which may be busy with thousands of others.  Nobody
waits for a process that has ended: its machine refuses the connection at once."""
_PAUSE_SECONDS = 0.5
"""After a newcomer could not be let in, until the next try."""
_MAX_NEWCOMER_BYTES = 1024
_DOOR = "door"
_IDLE_SECONDS = 60
"""After which the system asks whether the other end is still there."""


class Lines:
    """Connections to other ranks.  Any thread may send; one receives.

    Whoever comes in by the ``door``, a listening socket, has a negative number until ``rename``.
    """

    def __init__(self, door: socket.socket | None = None) -> None:
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[int, socket.socket] = {}
        self._halves: dict[int, bytes] = {}
        self._sending = Lock()
        self._door, self._num_newcomers = door, 0
        self._leaves_at: dict[int, float] = {}
        """When a newcomer that has not been given a rank is dropped."""
        self._opens_at: float | None = 0.0
        """While the door is shut: when it opens again."""
        self.refusal: OSError | None = None
        """Why the latest newcomer could not be let in.  It stays at the door."""

    @property
    def ranks(self) -> Sequence[int]:
        """Who is connected, without newcomers."""
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
        """A connection that is cut is noticed by ``receive``."""
        with self._sending, suppress(OSError, KeyError):
            self._sockets[rank].sendall(json.dumps(words).encode() + b"\n")

    def receive(self, seconds: float) -> list[tuple[int, Any]]:
        """What has come from which rank or newcomer, after a wait of at most ``seconds``.

        A list of words; None for a connection that was cut; bytes for a line that is no message.
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
        except OSError as error:  # no open file is left, most likely
            self.refusal = error
            self._shut()  # or else the wait for what comes would end at once, again and again
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
        words = json.loads(line)
    except (ValueError, RecursionError):
        return line
    return words if isinstance(words, list) and words else line


def _keep_alive(connection: socket.socket) -> None:
    """Firewalls forget a connection on which nothing passes; and a machine without power says no word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)


def call(host: str, port: int, rank: int, *words: Any) -> Lines:
    """A connection to whoever listens there, as ``rank``, once it has answered ``words`` with ``welcome``.

    Raises OSError where nobody does, or somebody who answers something else.
    """
    connection = socket.create_connection((host, port), timeout=JOIN_SECONDS)
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
