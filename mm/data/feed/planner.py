"""Plans which samples each step contains, ahead of training, in a separate process.

Planning a step takes time in proportion to the global batch: a second of Python for 100,000 samples, during which a
data owner could launch no work on its device.  So one process plans for all owners of a node and sends each the part
for its replica, 4 bytes per sample.  The order of an epoch, whose memory is in proportion to the dataset, exists only
once, in that process.  The first owner of the node starts the process through the fork server, like data workers.  It
ends with that owner, or when all owners have closed their connections.

This module must not import megatron, which would initialise a device in the planning process.
"""

import json
import secrets
import socket
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Client, Connection, Listener, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from mm.data.order.stream import SampleOrder, StepSamples
from mm.data.workers import fork_server
from mm.errors import UserError
from mm.process import ignore_stopping, node_id

NUM_AHEAD = 2
"""Steps planned before they are requested.  Owners request as far ahead as their workers prepare."""
_STEP, _PROBLEMS = b"\0", b"\1"
"""First byte of a message: a step, or the reason why there is none (JSON)."""

MakeOrder = Callable[[], SampleOrder]
"""Called in the planning process, so its pickle must be small; ``SampleOrder.dp_rank`` is ignored there."""


@dataclass(frozen=True)
class Seat:
    """A data owner on its node, with the address where the planner listens if this owner starts it."""

    node: str
    rank: int
    address: str
    key: bytes

    @classmethod
    def here(cls, rank: int) -> "Seat":
        """``rank`` is this process's global rank."""
        # Linux abstract sockets belong to the network namespace, and leave no file behind.
        return cls(node_id("net"), rank, f"\0mm-plan-{secrets.token_hex(16)}", secrets.token_bytes(32))


def start_planner(make_order: MakeOrder, seat: Seat, num_owners: int) -> BaseProcess:
    """Start the process that plans for ``num_owners`` owners, and wait until it listens.  It ends with this process.

    Raises UserError when it does not start.
    """
    context = fork_server()
    ready, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(make_order, seat, num_owners, sender), name="planner", daemon=True)
    process.start()
    sender.close()
    with ready:
        try:
            ready.recv_bytes()
        except EOFError:
            process.join()
            raise UserError(f"{socket.gethostname()}: the process that plans the samples of each step did not start "
                            f"(exit status {process.exitcode}).") from None
    return process


class PlannedSteps(Iterator[StepSamples]):
    """The endless steps of one replica."""

    def __init__(self, seat: Seat, dp_rank: int) -> None:
        """Connect to the process that listens at ``seat``.  Raises UserError if it has ended."""
        with _explaining_the_end():
            self._connection = Client(seat.address, "AF_UNIX", authkey=seat.key)
            self._connection.send_bytes(str(dp_rank).encode())

    def __next__(self) -> StepSamples:
        """The next step.  Raises UserError if it could not be planned, or if the process has ended."""
        with _explaining_the_end():
            with suppress(OSError):  # if the process has ended, its last message may still be in the pipe
                self._connection.send_bytes(b"")
            message = self._connection.recv_bytes()
        kind, content = message[:1], message[1:]
        if kind == _PROBLEMS:
            raise UserError(json.loads(content))
        return from_bytes(content)

    def close(self) -> None:
        """Request no more steps."""
        self._connection.close()


@contextmanager
def _explaining_the_end() -> Iterator[None]:
    """Turn a broken connection into a UserError.  Its text is the same for all owners of a node, so it is reported
    once."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise UserError(
            f"{socket.gethostname()}: the process that plans the samples of each step has ended, so the run ends too.  "
            f"If no error is reported above, it was killed: look for 'Out of memory' in the kernel log (dmesg), and "
            f"start the run again; it resumes from its last checkpoint.") from error


def to_bytes(step: StepSamples) -> bytes:
    """4 bytes per number: the number of microbatches, the number of samples of each, and the sample numbers."""
    return np.array([len(step), *map(len, step), *chain.from_iterable(step)], dtype="<u4").tobytes()


def from_bytes(content: bytes) -> StepSamples:
    """The inverse of ``to_bytes``."""
    numbers: list[int] = np.frombuffer(content, "<u4").tolist()
    first, step = 1 + numbers[0], []
    for count in numbers[1:first]:
        step.append(numbers[first : first + count])
        first += count
    assert first == len(numbers)
    return step


def _run(make_order: MakeOrder, seat: Seat, num_owners: int, ready: Connection) -> None:
    """Main function of the planning process."""
    ignore_stopping()
    with Listener(seat.address, "AF_UNIX", num_owners, authkey=seat.key) as listener:
        ready.send_bytes(b"")
        ready.close()
        connections = [listener.accept() for _ in range(num_owners)]
    try:
        shares = [_UnsentSteps(connection, int(connection.recv_bytes())) for connection in connections]
        _serve(make_order(), shares)
    except Exception as error:
        message = _PROBLEMS + json.dumps(_problems(error)).encode()
        for connection in connections:
            with suppress(OSError):  # the owner has gone
                connection.send_bytes(message)


def _problems(error: Exception) -> list[str]:
    """The same text on every node, so that problems are reported once."""
    if isinstance(error, UserError):
        return list(error.problems)
    trace = "".join(traceback.format_exception(error))
    return [f"the process that plans the samples of each step has failed:\n{trace}"]


class _UnsentSteps:
    """The planned steps of one owner that are not sent yet."""

    def __init__(self, connection: Any, dp_rank: int) -> None:
        self.connection, self.dp_rank = connection, dp_rank
        self.steps: deque[bytes] = deque()
        self.is_waiting = False
        self.has_closed = False

    def ask(self) -> None:
        """Receive the owner's request for a step, or notice that it has closed."""
        try:
            self.connection.recv_bytes()
            self.is_waiting = True
        except (EOFError, OSError):
            self.has_closed = True

    def send(self) -> None:
        """Send a step if one is requested and planned."""
        if not (self.is_waiting and self.steps):
            return
        self.is_waiting = False
        try:
            self.connection.send_bytes(self.steps.popleft())
        except OSError:
            self.has_closed = True


def _serve(order: SampleOrder, shares: list[_UnsentSteps]) -> None:
    """Plan and send until all owners have closed.

    A step is sent only to an owner that requests it, and so reads: a full socket of one owner must not block another.
    Replicas request at their own pace, because workers prepare microbatches and steps differ in their number.
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
