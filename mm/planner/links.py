"""Measures how long messages and collectives take between the ranks of this job."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from mm.device.device import Device
from mm.parallel.mesh import Mesh
from mm.plan.laws import Law, Timed, fitted
from mm.planner.timing import mean_of_ranks, repeated_seconds

NUM_REPEATS = 9
_BYTES = (4 << 10, 256 << 10, 2 << 20, 16 << 20)


def message_law(device: Device, mesh: Mesh) -> Law | None:
    """One message from a rank to the next, by bytes; None with one rank."""
    if mesh.world_size == 1:
        return None
    other = mesh.rank ^ 1

    def exchange(tensor: torch.Tensor) -> None:
        """There and back."""
        for is_sender in (mesh.rank % 2 == 0, mesh.rank % 2 == 1):
            (dist.send if is_sender else dist.recv)(tensor, other)

    return _law(device, mesh, exchange if other < mesh.world_size else None, num_each=2)


def all_reduce_laws(device: Device, mesh: Mesh) -> dict[int, Law]:
    """The sum over a group, by bytes, for every group size that is a power of two, and for the whole world."""
    sizes = sorted({mesh.world_size, *(1 << power for power in range(1, mesh.world_size.bit_length()))} - {1})
    found = {}
    for size in sizes:
        groups = [list(range(first, first + size)) for first in range(0, mesh.world_size - size + 1, size)]
        group, _ = dist.new_subgroups_by_enumeration(groups, timedelta(minutes=5))
        assert not isinstance(group, int), "torch gives a number only to ranks outside of a group"
        found[size] = _law(device, mesh, None if group is None else partial(dist.all_reduce, group=group), num_each=1)
        if group is not None:
            dist.destroy_process_group(group)
    return found


def _law(device: Device, mesh: Mesh, work: Callable[[torch.Tensor], object] | None, num_each: int) -> Law:
    """The seconds of ``work`` on tensors of several sizes, by bytes, divided by ``num_each``.

    ``work`` is None on the ranks that have no part in it.  Their times do not count.
    """
    times = []
    for num_bytes in _BYTES:
        tensor = torch.zeros(num_bytes // 4, device=device.torch_device)
        seconds = repeated_seconds(device, NUM_REPEATS, partial(work or _nothing, tensor))
        own = None if work is None else median(seconds) / num_each
        times.append(Timed(num_bytes, 0.0, mean_of_ranks(own, mesh)))
    return fitted(times)


def _nothing(_: torch.Tensor) -> None:
    """The work of ranks that only wait for the others."""
