"""Collectives and messages between the ranks of ``mm-doctor``, on small tensors whose results are known.

Each finding names the ranks at fault, with their devices.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm.device.device import Device
from mm.doctor.diagnosis import Diagnosis, fault, ok, warning
from mm.parallel.agreement import by_rank
from mm.parallel.mesh import Mesh

NUM_ELEMENTS = 1 << 18
"""In fp32: 1 MiB."""
_NUM_REPEATS = 5
_SIDE, _NUM_PRODUCTS = 1024, 5
"""A device takes longer to start a product and to report its end than the CPU does, so it computes several in a row."""
_LATE = 2.0
"""A rank is slow if it takes more than this many times the median of all ranks."""
_CURE = ("check the links (nvidia-smi topo -m, npu-smi info -t topo), update the driver, or turn direct links off "
         "(NCCL_P2P_DISABLE=1, HCCL_INTRA_PCIE_ENABLE=1) to see which one is at fault")


@dataclass(frozen=True)
class LinkTest:
    """A collective, or a message to another rank, whose result is known."""

    name: str
    run: Callable[[], Tensor]
    """Returns for each of the ``origins`` whether what arrived here is right."""
    origins: Sequence[int] = ()
    """The ranks that sent what arrives here; () if every number mixes all of them."""
    group: dist.ProcessGroup | None = None
    """The ranks that take part, to be destroyed afterwards; None for all."""


def link_findings(
    device: Device, mesh: Mesh, names: Sequence[str], begin: Callable[[str], None]
) -> Iterator[Diagnosis]:
    """Collective over all ranks.  ``names``: each rank with its device; ``begin`` notes what this rank begins."""
    yield _speeds(device, mesh, names, begin)
    if mesh.world_size == 1:
        yield warning("links", "one rank, so no link was tried", "mm-doctor --num-processes 2, or more")
        return
    for one in _link_tests(device, mesh):
        begin(one.name)
        wrong, seconds = set[int](), list[float]()
        for _ in range(_NUM_REPEATS):
            began = time.perf_counter()
            right = one.run().tolist()  # waits for the device
            seconds.append(time.perf_counter() - began)
            wrong |= {index for index, is_right in enumerate(right) if not is_right}
        found = by_rank(mesh, ([one.origins[index] for index in sorted(wrong)] if one.origins else [], bool(wrong)))
        slowest = max(by_rank(mesh, min(seconds)))
        if one.group is not None:
            dist.destroy_process_group(one.group)
        receivers = [rank for rank, (_, is_wrong) in enumerate(found) if is_wrong]
        if not receivers:
            yield ok("links", f"{one.name}: {1000 * slowest:.2f} ms for 1 MiB")
            continue
        senders = sorted({rank for origins, _ in found for rank in origins})
        what = f"what {_listed(senders, names)} sends arrives wrong on" if senders else "wrong numbers on"
        yield fault("links", f"{one.name}: {what} {_listed(receivers, names)}", _CURE)


def _listed(ranks: Sequence[int], names: Sequence[str]) -> str:
    if len(ranks) == len(names) > 2:
        return f"all {len(names)} ranks"
    return ", ".join(names[rank] for rank in ranks)


def _speeds(device: Device, mesh: Mesh, names: Sequence[str], begin: Callable[[str], None]) -> Diagnosis:
    """Whether some rank computes the same products more slowly than the others."""
    begin("matrix products")
    shares_device = device.platform.num_devices() is None  # as on the CPU, where other processes compute, too
    num_products = 1 if shares_device else _NUM_PRODUCTS
    one = torch.full((_SIDE, _SIDE), 1.0, device=device.torch_device)
    seconds = list[float]()
    for _ in range(_NUM_REPEATS):
        began = time.perf_counter()
        for _ in range(num_products):
            one = one @ one / _SIDE
        one[0, 0].item()  # waits for the device
        seconds.append((time.perf_counter() - began) / num_products)
    of_ranks = by_rank(mesh, min(seconds))
    usual, slowest = median_low(of_ranks), max(of_ranks)
    text = f"{_SIDE}^3 in fp32 takes {1000 * usual:.2f} ms"
    if slowest > _LATE * usual and not shares_device:
        return warning("matrix products", f"{text}, but {names[of_ranks.index(slowest)]} takes "
                       f"{slowest / usual:.1f} times as long",
                       "look at its clock, its temperature and other processes on it (nvidia-smi -q -d "
                       "CLOCK,PERFORMANCE, npu-smi info, top)")
    return ok("matrix products", f"{text}, and on the slowest, {names[of_ranks.index(slowest)]}, {1000 * slowest:.2f}")


def _link_tests(device: Device, mesh: Mesh) -> Iterator[LinkTest]:
    """Collectives of all ranks, messages over each distance, then collectives of smaller groups, as in a layout."""
    rank, size, here = mesh.rank, mesh.world_size, device.torch_device

    def filled(value: float, count: int = NUM_ELEMENTS) -> Tensor:
        return torch.full((count,), value, device=here)

    def all_gather() -> Tensor:
        whole = filled(-1.0, size * NUM_ELEMENTS)
        dist.all_gather_into_tensor(whole, filled(float(rank)))
        return (torch.arange(size, device=here)[:, None] == whole.view(size, -1)).all(1)

    def broadcast() -> Tensor:
        own = filled(float(rank))
        dist.broadcast(own, size - 1)
        return (own == size - 1).all()[None]

    def reduced(ranks: Sequence[int], group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
        def all_reduce() -> Tensor:
            own = filled(rank + 1.0)
            dist.all_reduce(own, group=group)
            return (own == sum(ranks) + len(ranks)).all()[None]

        return all_reduce

    def shifted(distance: int) -> Callable[[], Tensor]:
        def exchange() -> Tensor:
            arriving = filled(-1.0)
            both = [dist.P2POp(dist.isend, filled(float(rank)), (rank + distance) % size),
                    dist.P2POp(dist.irecv, arriving, (rank - distance) % size)]
            for waiting in dist.batch_isend_irecv(both):
                waiting.wait()
            return (arriving == (rank - distance) % size).all()[None]

        return exchange

    yield LinkTest(f"all-reduce over {size} ranks", reduced(range(size), None))
    yield LinkTest(f"all-gather over {size} ranks", all_gather, range(size))
    yield LinkTest(f"broadcast over {size} ranks", broadcast, [size - 1])
    distances = [1 << power for power in range(size.bit_length()) if 1 << power < size]
    for distance in distances:
        yield LinkTest(f"messages between ranks {distance} apart", shifted(distance),
                       [(rank - distance) % size])
    for step in distances:
        for name, groups in _divisions(size, step):
            mine: Any
            mine, _ = dist.new_subgroups_by_enumeration(groups)
            yield LinkTest(name, reduced(next(one for one in groups if rank in one), mine), group=mine)


def _divisions(size: int, step: int) -> Iterator[tuple[str, list[list[int]]]]:
    """Groups of neighbours, as of tensor parallelism, and of ranks that are ``step`` apart, as of the other axes."""
    if step > 1 and size % step == 0:
        yield (f"all-reduce in groups of {step} neighbours",
               [list(range(first, first + step)) for first in range(0, size, step)])
        yield (f"all-reduce in groups of ranks {step} apart",
               [list(range(first, size, step)) for first in range(step)])
