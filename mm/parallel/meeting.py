"""Where the ranks of one attempt of a run find each other, before any process group is made.

torchrun restarts ranks (``--max-restarts``) with the store of the stopped attempt, in which every address is left.  A
rank that is faster than rank 0 would read a stale one.  The number of restarts does not identify an attempt, because
each node counts its own.  So a rank trusts an address only once the hub there has answered: a hub ends with its
attempt.  All other keys of the attempt are prefixed with the hub's token.
"""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from mm.errors import UserError, refuse
from mm.launched import Launched, launcher_problems
from mm.parallel.door import LOOPBACK, own_address
from mm.parallel.hub import Hub
from mm.parallel.lines import JOIN_SECONDS, Lines, call
from mm.parallel.node import Identity, kill, own_identity

_ADDRESS = "mm/hub"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two attempts to find rank 0; each pause is twice as long as the one before, up to the longest."""


@dataclass(frozen=True)
class Joined:
    """What a rank gets when it joins the hub."""

    hub: Hub | None
    """On rank 0; None elsewhere."""
    lines: Lines
    """The connection to the hub, under the number 0."""
    store: Store | None
    """Keys of this attempt only; None in a process that no launcher started."""


@dataclass(frozen=True)
class Meeting:
    """This rank, the number of ranks, and where to find rank 0."""

    rank: int
    num_ranks: int
    host: str
    """Host of rank 0, as this rank reaches it."""
    store: Store | None
    """Shared by all attempts; None in a process that no launcher started."""
    timeout: timedelta = timedelta(minutes=10)
    """How long a rank may take to be ready after another one is."""

    @classmethod
    def of_launcher(cls, timeout_minutes: float) -> "Meeting":
        """Read the launcher's environment variables.  Without them this process is the only rank and opens no port.

        Raises UserError if a variable is missing or wrong, or the launcher's store cannot be opened or reached.
        """
        timeout = timedelta(minutes=timeout_minutes)
        if "RANK" not in os.environ:
            return cls(0, 1, "localhost", None, timeout)
        refuse(launcher_problems(os.environ, meets=True))
        here, host, port = Launched.here(), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        assert here.num_ranks is not None, "checked"
        rank = here.rank
        # torchrun's agent has a store for all attempts; other launchers leave that to rank 0.
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  (torch documents it)
                host, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True)
        except dist.DistError as error:
            does = "open" if serves else "reach"
            raise UserError(f"rank {rank} cannot {does} the launcher's store at {host}:{port} (MASTER_ADDR and "
                            f"MASTER_PORT): {error}") from error
        return cls(rank, here.num_ranks, LOOPBACK if here.is_on_one_machine else host, store, timeout)

    def join(
        self, at_end: Callable[[], None], end_seconds: float, answer_seconds: float = math.inf,
    ) -> Joined:  # fmt: skip
        """Start the hub on rank 0, find it on the others, and join it.

        ``at_end`` is called before the hub ends this process; ``end_seconds``: see ``Hub``.  ``answer_seconds``: how
        long a hub may leave this rank without an answer.

        Raises UserError if rank 0 is not reached in time, and kills a rank 0 of this machine that does not answer.
        """
        if self.rank == 0:
            hub = Hub(self.num_ranks, self.timeout.total_seconds(), at_end, end_seconds, own_address(self.host))
            if self.store is not None:
                self.store.set(_ADDRESS, json.dumps((hub.address, hub.port, hub.token, own_identity())))
            return Joined(hub, call(hub.address, hub.port, 0, "joins", hub.token, 0), self._own_store(hub.token))
        assert self.store is not None, "several ranks have a launcher"
        until, problem = time.monotonic() + self.timeout.total_seconds(), "it has not started"
        pause = _FIRST_PAUSE
        while time.monotonic() < until:
            try:
                if self.store.check([_ADDRESS]):  # to wait for it would delay signals, such as when rank 0 has died
                    # an earlier attempt's while rank 0 is late
                    own, port, token, process = json.loads(self.store.get(_ADDRESS))
                    problem = f"port {port}"
                    return Joined(None, self._called(own, port, token, process, answer_seconds), self._own_store(token))
            except OSError as error:
                problem = f"{problem}: {error}"
            except dist.DistError as error:  # the store has ended
                problem = str(error)
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise UserError(f"rank {self.rank} did not reach rank 0 at {self.host} within "
                        f"{self.timeout.total_seconds() / 60:g} minutes ({problem}); see the output of rank 0's node")

    def _called(self, own: str, port: int, token: str, process: Identity, answer_seconds: float) -> Lines:
        """Connect to the hub of ``process``: at the launcher's name for its machine, or else at the address ``own``
        that the hub gave.  They differ if that machine is in several networks."""
        hosts = (self.host,) if own in (self.host, "localhost", LOOPBACK) else (self.host, own)
        for host in hosts:
            try:
                return call(host, port, 0, "joins", token, self.rank, seconds=min(answer_seconds, JOIN_SECONDS))
            except OSError as error:
                if host != hosts[-1]:
                    continue
                if not isinstance(error, TimeoutError) or answer_seconds > JOIN_SECONDS:
                    raise
                kill([process])
                raise UserError(
                    f"rank {self.rank} has waited {answer_seconds:.0f} s to join rank 0 at {host}:{port}, and rank 0 "
                    f"does not answer: it holds Python's GIL, or its process is stopped; --phase-timeouts "
                    f"start=SECONDS sets this limit") from error
        raise AssertionError("there is a host")

    def _own_store(self, token: str) -> Store | None:
        return None if self.store is None else PrefixStore(f"mm/{token}", self.store)
