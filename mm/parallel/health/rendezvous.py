"""How the ranks of one attempt of a run find each other in the launcher's store, before any process group is made.

torchrun restarts ranks (``--max-restarts``) with the store of the stopped attempt, and each node counts its restarts by
itself.  So rank 0 draws a random prefix for the keys of its attempt and writes it to the key ``mm/attempt``.  A rank
whose own key has a value already, or whose attempt has ended after another number of restarts, looks at an earlier one,
and waits for another.
"""

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from mm.environment import Launched, launcher_problems
from mm.errors import UserError, refuse
from mm.process import node_id, open_file_limit

ATTEMPT, END, OVER, NOTHING = "mm/attempt", "end", "over", "-"
"""Keys: of the current attempt, and in each attempt why it ends, and that its end is reported; and a value not yet set.
The other keys of an attempt are the numbers of its ranks."""


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks, as rank 0 has written it."""

    prefix: str
    host: str
    facts: Mapping[str, str]
    num_restarts: str
    """By the launcher of rank 0's node."""
    node: str
    """``node_id`` of rank 0, whose launcher also counts the restarts of the ranks beside it."""


@dataclass(frozen=True)
class Rendezvous:
    """This rank, the number of ranks, and how to open the store that they share."""

    rank: int = 0
    num_ranks: int = 1
    open_store: Callable[[], Store] = dist.HashStore  # pyright: ignore[reportPrivateImportUsage]  (torch documents it)
    """May take as long as ``timeout``.  Each call opens another connection."""
    neighbours: tuple[int, ...] = ()
    """The ranks of this node, where the launcher tells."""
    timeout: timedelta = timedelta(minutes=10)
    """How long a rank may take to be ready after another one is."""

    @classmethod
    def of_launcher(cls, timeout_minutes: float) -> "Rendezvous":
        """Read the launcher's environment variables.  Without them this process is the only rank and opens no port."""
        timeout, environment = timedelta(minutes=timeout_minutes), os.environ
        open_file_limit()  # rank 0 has a connection to each rank
        if "RANK" not in environment:
            return cls(timeout=timeout)
        refuse(launcher_problems(environment, meets=True))
        here, host, port = Launched.here(environment), environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        assert here.num_ranks is not None, "checked"
        # torchrun's agent has a store for all attempts; other launchers leave that to rank 0.
        serves = environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and here.rank == 0
        has_served: list[Store] = []

        def open_store() -> Store:
            try:
                store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  (torch documents it)
                    host, port, is_master=serves and not has_served, timeout=timeout, wait_for_workers=False,
                    multi_tenant=True)
            except dist.DistError as error:
                raise UserError(f"rank {here.rank} cannot {'open' if serves else 'reach'} the launcher's store at "
                                f"{host}:{port} (MASTER_ADDR and MASTER_PORT): {str(error).splitlines()[0]}") from error
            has_served.append(store)
            return store

        first = here.rank - here.local_rank
        # a launcher that shows each rank one device may give all of them the local rank 0
        neighbours = tuple(range(first, min(first + (here.num_local_ranks or 0), here.num_ranks)))
        return cls(here.rank, here.num_ranks, open_store, neighbours, timeout)

    def begin(self, store: Store, facts: Mapping[str, str]) -> Attempt:
        attempt = Attempt(secrets.token_hex(8), socket.gethostname(), facts, _num_restarts(), node_id())
        keys = PrefixStore(attempt.prefix, store)
        for name in (END, OVER, *map(str, range(self.num_ranks))):
            keys.set(name, NOTHING)
        store.set(ATTEMPT, json.dumps(asdict(attempt)))
        return attempt

    def find(self, store: Store, own: Callable[[Attempt], str]) -> Attempt | None:
        """On another rank: join the current attempt by setting this rank's key to ``own`` of it; None if there is none
        yet."""
        if not store.check([ATTEMPT]):  # to wait for it would block this connection
            return None
        attempt = Attempt(**json.loads(store.get(ATTEMPT)))
        keys, me = PrefixStore(attempt.prefix, store), str(self.rank)
        before, end = (value.decode() for value in keys.multi_get([me, END]))
        may_be_over = end != NOTHING or attempt.node == node_id()
        if before != NOTHING or (may_be_over and attempt.num_restarts != _num_restarts()):
            return None  # an earlier one
        keys.set(me, own(attempt))
        return attempt


def _num_restarts() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
