"""What gloo's groups cost by number of ranks: calls of the store and open files, to make one and for what it then does.

    python -m tests.parallel.control 8 32 128

Each rank is a thread of this process, on one store that counts.  ``TORCH_GLOO_LAZY_INIT=0`` in the environment shows
groups in which every rank is connected with every other from the start; without it ranks connect when they first talk,
as in a run (``mm/parallel/mesh.py``).  ``computed`` continues what was measured to any number of ranks.
"""

import json
import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
_LIMIT = timedelta(minutes=2)
ADDRESS_BYTES = 154
"""Size of the address that each rank leaves in the store."""


@dataclass(frozen=True)
class Cost:
    """What one group costs, summed over all ranks."""

    store_calls: int
    store_bytes: int
    """Bytes read from the store."""
    open_files: int


class CountingStore(Store):
    """Counts what ranks read and write."""

    def __init__(self) -> None:
        super().__init__()
        self._inner = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  (torch documents it)
        self._lock = threading.Lock()
        self.calls = self.bytes = 0

    def _count(self, num_bytes: int = 0) -> None:
        with self._lock:
            self.calls += 1
            self.bytes += num_bytes

    def set(self, key: str, value: str) -> None:
        self._inner.set(key, value)
        self._count()

    def get(self, key: str) -> bytes:
        value = self._inner.get(key)
        self._count(len(value))
        return value

    def wait(self, keys: list[str], timeout: timedelta = _LIMIT) -> None:
        self._inner.wait(keys, timeout)
        self._count()

    def has_extended_api(self) -> bool:
        return False


def _broadcast(group: ProcessGroupGloo, rank: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([torch.zeros(100)], options).wait()


def _all_reduce(group: ProcessGroupGloo, rank: int) -> None:
    group.allreduce([torch.zeros(15, dtype=torch.int64)]).wait()


def _all_gather(group: ProcessGroupGloo, rank: int) -> None:
    group.allgather([[torch.zeros(10) for _ in range(group.size())]], [torch.zeros(10)]).wait()


def _gather(group: ProcessGroupGloo, rank: int) -> None:
    options = dist.GatherOptions()
    options.rootRank = 0
    group.gather([[torch.zeros(10) for _ in range(group.size())]] if rank == 0 else [], [torch.zeros(10)],
                 options).wait()


def _barrier(group: ProcessGroupGloo, rank: int) -> None:
    group.barrier().wait()


COLLECTIVES: dict[str, Callable[[ProcessGroupGloo, int], None]] = {
    "broadcast": _broadcast, "all-reduce": _all_reduce, "all-gather": _all_gather, "gather": _gather,
    "barrier": _barrier}
"""All collectives that a run uses on its gloo groups."""


def measured(num_ranks: int, name: str) -> tuple[Cost, Cost]:
    """Costs of a new group, and of the same group after its first collective ``name``."""
    store, before = CountingStore(), _num_open_files()
    groups: list[ProcessGroupGloo | None] = [None] * num_ranks

    def make(rank: int) -> None:
        groups[rank] = ProcessGroupGloo(store, rank, num_ranks, _LIMIT)

    def use(rank: int) -> None:
        group = groups[rank]
        assert group is not None, "made before"
        COLLECTIVES[name](group, rank)

    costs = []
    for part in (make, use):
        _on_all(num_ranks, part)
        costs.append(Cost(store.calls, store.bytes, _num_open_files() - before))
    return costs[0], costs[1]


def computed(num_ranks: int, name: str) -> Cost:
    """Cost after the first collective ``name``, in a group whose ranks connect when they first communicate."""
    n = num_ranks
    return _with_connections(
        n, {"broadcast": n - 1, "gather": n - 1, "barrier": _num_barrier_connections(n)}.get(name, n), ADDRESS_BYTES)


def computed_of_pairs(num_ranks: int) -> Cost:
    """Cost of a new group with gloo as torch had it before 2.8: each rank connects to every other at once.

    An address is read together with what belongs to the other ranks of the group.
    """
    return _with_connections(num_ranks, math.comb(num_ranks, 2), ADDRESS_BYTES + 8 * num_ranks)


def _with_connections(num_ranks: int, num_connections: int, address_bytes: int) -> Cost:
    """A connection is an open file on both ranks and two calls of each of them, which read the other's address once."""
    return Cost(num_ranks + 4 * num_connections, 2 * address_bytes * num_connections,
                4 * num_ranks + 2 * num_connections)


def _num_barrier_connections(num_ranks: int) -> int:
    """Each rank talks with those at every power of two from it; half around the ring both ways lead to the same one."""
    return len({frozenset((rank, (rank + 2**power) % num_ranks))
                for rank in range(num_ranks) for power in range(math.ceil(math.log2(num_ranks)))})


def _num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _on_all(num_ranks: int, work: Callable[[int], None]) -> None:
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def main(argv: list[str]) -> None:
    for num_ranks in map(int, argv):
        for name in COLLECTIVES:
            made, used = measured(num_ranks, name)
            print(json.dumps({"ranks": num_ranks, "collective": name, "made": asdict(made), "used": asdict(used),
                              "computed": asdict(computed(num_ranks, name))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
