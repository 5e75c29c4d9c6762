"""Plans which samples each step holds, in a process of its own, ahead of the training.

To plan a step takes time in proportion to the global batch: a second of Python for 100,000 samples, during which an
owner of data could launch no work on its device.  So one process plans for all owners of a node, and sends each the
share of its replica: 4 bytes a sample.  What takes memory in proportion to the dataset, the order of an epoch, is there
once.  The process begins with the first owner of the node, through the fork server like data workers, and ends with
that owner, or when all owners have closed their connections.

What a sampler does, what a sample is, and which ranks there are, is not known here: the process that plans must not
import megatron, which would look at its device.
"""

import json
import os
import secrets
import signal
import socket
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Client, Connection, Listener, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from mm.data.order.stream import Order, Step
from mm.data.workers import end_with_parent, fork_server
from mm.errors import UserError

NUM_AHEAD = 2
"""Steps that are planned before they are asked for.  Owners ask as far ahead as their workers prepare."""
_STEP, _PROBLEMS = b"\0", b"\1"
"""How a message begins: a step, or why there is none (JSON)."""

MakeOrder = Callable[[], Order]
"""Called in the planning process, so it must pickle small; ``Order.dp_rank`` has no effect there."""


@dataclass(frozen=True)
class Seat:
    """One owner of data on its node, and where the process that plans would listen if this owner started it."""

    node: str
    rank: int
    address: str
    key: bytes

    @classmethod
    def here(cls, rank: int) -> "Seat":
        """``rank`` is that of this process in the world."""
        # Linux' abstract sockets belong to the network namespace, and leave no file behind.
        return cls(_node(), rank, f"\0mm-plan-{secrets.token_hex(16)}", secrets.token_bytes(32))


def _node() -> str:
    """What processes share that can reach each other's abstract sockets; another for each process where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return secrets.token_hex(16)


def start_planner(make_order: MakeOrder, seat: Seat, num_owners: int) -> BaseProcess:
    """Start the process that plans for ``num_owners`` owners, and wait until it listens; it ends with this process.

    Raises UserError when it does not start.
    """
    context = fork_server()
    ready, told = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(make_order, seat, num_owners, told), name="planner", daemon=True)
    process.start()
    told.close()
    with ready:
        try:
            ready.recv_bytes()
        except EOFError:
            process.join()
            raise UserError(f"{socket.gethostname()}: the process that plans the samples of each step did not start "
                            f"(exit status {process.exitcode}).") from None
    return process


class PlannedSteps(Iterator[Step]):
    """The steps of one replica, without end."""

    def __init__(self, seat: Seat, dp_rank: int) -> None:
        """Connect to the process that listens at ``seat``.  Raises UserError when it has ended."""
        with _naming_the_end():
            self._connection = Client(seat.address, "AF_UNIX", authkey=seat.key)
            self._connection.send_bytes(str(dp_rank).encode())

    def __next__(self) -> Step:
        """The next step.  Raises UserError when it could not be planned, or the process has ended."""
        with _naming_the_end():
            with suppress(OSError):  # where the process has ended, what it last said may still be there
                self._connection.send_bytes(b"")
            message = self._connection.recv_bytes()
        kind, content = message[:1], message[1:]
        if kind == _PROBLEMS:
            raise UserError(json.loads(content))
        return from_bytes(content)

    def close(self) -> None:
        """Ask for nothing more."""
        self._connection.close()


class _naming_the_end:
    """Turn a broken connection into what the user should know.  The same words for all owners of a node, so that they
    are reported once."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (EOFError, OSError)):
            raise UserError(
                f"{socket.gethostname()}: the process that plans the samples of each step has ended, and so does the "
                f"run.  If nothing above says why, something has killed it: look for 'Out of memory' in the kernel's "
                f"log (dmesg), and start again; the run goes on from its last checkpoint.") from error


def to_bytes(step: Step) -> bytes:
    """4 bytes for each number: how many microbatches, the samples of each, and which samples these are."""
    return np.array([len(step), *map(len, step), *chain.from_iterable(step)], dtype="<u4").tobytes()


def from_bytes(content: bytes) -> Step:
    """The inverse of ``to_bytes``."""
    numbers: list[int] = np.frombuffer(content, "<u4").tolist()
    first, step = 1 + numbers[0], []
    for count in numbers[1:first]:
        step.append(numbers[first : first + count])
        first += count
    assert first == len(numbers)
    return step


def _run(make_order: MakeOrder, seat: Seat, num_owners: int, ready: Connection) -> None:
    """The process that plans."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal: owners say what it means
    end_with_parent()
    with Listener(seat.address, "AF_UNIX", num_owners, authkey=seat.key) as listener:
        ready.send_bytes(b"")
        ready.close()
        connections = [listener.accept() for _ in range(num_owners)]
    try:
        shares = [_Share(connection, int(connection.recv_bytes())) for connection in connections]
        _serve(make_order(), shares)
    except Exception as error:
        message = _PROBLEMS + json.dumps(_problems(error)).encode()
        for connection in connections:
            with suppress(OSError):  # of an owner that has gone
                connection.send_bytes(message)


def _problems(error: Exception) -> list[str]:
    """In the same words on every node, so that they are reported once."""
    if isinstance(error, UserError):
        return list(error.problems)
    trace = "".join(traceback.format_exception(error))
    return [f"the process that plans the samples of each step has failed:\n{trace}"]


class _Share:
    """What is planned for one owner and not yet sent."""

    def __init__(self, connection: Any, dp_rank: int) -> None:
        self.connection, self.dp_rank = connection, dp_rank
        self.steps: deque[bytes] = deque()
        self.is_waiting = False
        self.has_closed = False

    def ask(self) -> None:
        """Take what the owner has sent: that it waits for a step, or has closed."""
        try:
            self.connection.recv_bytes()
            self.is_waiting = True
        except (EOFError, OSError):
            self.has_closed = True

    def send(self) -> None:
        """Send a step where one is waited for and planned."""
        if not (self.is_waiting and self.steps):
            return
        self.is_waiting = False
        try:
            self.connection.send_bytes(self.steps.popleft())
        except OSError:
            self.has_closed = True


def _serve(order: Order, shares: list[_Share]) -> None:
    """Plan and send until all owners have closed.

    A step is sent only to an owner that asks, and so reads: a full socket of one must not keep another from its step.
    Replicas ask at their own pace, because workers prepare microbatches and a step may have any number of them.
    """
    number = 0
    while shares:
        is_due = min(len(share.steps) for share in shares) < NUM_AHEAD
        asking = wait([share.connection for share in shares], 0 if is_due else None)
        for share in shares:
            if share.connection in asking:
                share.ask()
            share.send()
        shares = [share for share in shares if not share.has_closed]
        if is_due and shares:
            ranks = order.of_ranks(number)
            number += 1
            for share in shares:
                share.steps.append(_STEP + to_bytes(ranks[share.dp_rank]))
                share.send()
