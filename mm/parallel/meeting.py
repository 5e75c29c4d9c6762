"""Where the ranks of one attempt of a run find each other, before any process group is made.

torchrun restarts ranks (``--max-restarts``) with the store of the stopped attempt, and with it every address that was
left there; ranks that come before a slow rank 0 would read those.  Nor does the number of restarts tell attempts apart,
because each node counts its own.  So a rank believes an address only once the hub at it has answered: the hub ends with
its attempt.  What the attempt then leaves in the store has the hub's token in its name.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from mm.errors import UserError
from mm.parallel.hub import Hub
from mm.parallel.lines import Lines, call

_ADDRESS = "mm/hub"
_RETRY_SECONDS = 0.2


@dataclass(frozen=True)
class Joined:
    """What a rank has that has found the hub."""

    hub: Hub | None
    """On rank 0."""
    lines: Lines
    """With the hub as rank 0."""
    store: Store | None
    """Which only ranks of this attempt know; None in a process that no launcher started."""


@dataclass(frozen=True)
class Meeting:
    """Who meets where."""

    rank: int
    num_ranks: int
    host: str
    """Where rank 0 is."""
    store: Store | None
    """Of all attempts; None in a process that no launcher started."""
    timeout: timedelta = timedelta(minutes=10)
    """How long ranks may be late."""

    @classmethod
    def of_launcher(cls, timeout_minutes: float) -> "Meeting":
        """As the environment says.  Without a launcher this process is alone, and opens no port to others."""
        timeout = timedelta(minutes=timeout_minutes)
        if "RANK" not in os.environ:
            return cls(0, 1, "localhost", None, timeout)
        rank, host, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torchrun's agent has a store for all attempts; other launchers leave that to rank 0.
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  (torch documents it)
                host, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True)
        except dist.DistError as error:
            does = "open" if serves else "reach"
            raise UserError(f"rank {rank} cannot {does} the launcher's store at {host}:{port} (MASTER_ADDR and "
                            f"MASTER_PORT): {error}") from error
        return cls(rank, int(os.environ["WORLD_SIZE"]), host, store, timeout)

    def join(self, at_end: Callable[[], None]) -> Joined:
        """Open the hub on rank 0, or find it.  ``at_end`` is called before the hub ends this process.

        Raises UserError where nobody can be reached.
        """
        if self.rank == 0:
            hub = Hub(self.num_ranks, self.timeout.total_seconds(), at_end)
            if self.store is not None:
                self.store.set(_ADDRESS, json.dumps((hub.port, hub.token)))
            return Joined(hub, call("localhost", hub.port, 0, "joins", hub.token, 0), self._own_store(hub.token))
        assert self.store is not None, "several ranks have a launcher"
        until, problem = time.monotonic() + self.timeout.total_seconds(), "it has not come"
        while time.monotonic() < until:
            try:
                port, token = json.loads(self.store.get(_ADDRESS))  # of an earlier attempt, as long as rank 0 is late
                return Joined(None, call(self.host, port, 0, "joins", token, self.rank), self._own_store(token))
            except OSError as error:
                problem = f"port {port}: {error}"
            except dist.DistError as error:  # the store has ended, or nothing has come into it
                problem = str(error)
                break
            time.sleep(_RETRY_SECONDS)
        raise UserError(f"rank {self.rank} did not reach rank 0 at {self.host} within "
                        f"{self.timeout.total_seconds() / 60:g} minutes ({problem}); see the output of rank 0's node")

    def _own_store(self, token: str) -> Store | None:
        return None if self.store is None else PrefixStore(f"mm/{token}", self.store)
