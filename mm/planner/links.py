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

NUM_REPEATS = 9
_BYTES = (4 << 10, 256 << 10, 2 << 20, 16 << 20)


def message_law(device: Device, mesh: Mesh) -> Law | None:
    """One message from a rank to the next, by bytes; None with one rank."""
    if mesh.world_size == 1:
        return None
    other = mesh.rank ^ 1

    def exchange(tensor: torch.Tensor) -> None:
        """There and back."""
        if other >= mesh.world_size:
            return
        for is_sender in (mesh.rank % 2 == 0, mesh.rank % 2 == 1):
            (dist.send if is_sender else dist.recv)(tensor, other)

    return _law(device, mesh, exchange, num_each=2)


def all_reduce_laws(device: Device, mesh: Mesh) -> dict[int, Law]:
    """The sum over a group, by bytes, for every group size that is a power of two, and for the whole world."""
    sizes = sorted({mesh.world_size, *(1 << power for power in range(1, mesh.world_size.bit_length()))} - {1})
    found = {}
    for size in (one for one in sizes if one <= mesh.world_size):
        groups = [list(range(first, first + size)) for first in range(0, mesh.world_size - size + 1, size)]
        group, _ = dist.new_subgroups_by_enumeration(groups, timedelta(minutes=5))
        assert not isinstance(group, int), "torch gives a number to the ranks outside of a group only"
        found[size] = _law(device, mesh, partial(_sum, group=group), num_each=1)
        if group is not None:
            dist.destroy_process_group(group)
    return found


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(tensor, group=group)


def _law(device: Device, mesh: Mesh, work: Callable[[torch.Tensor], None], num_each: int) -> Law:
    """``work`` on tensors of several sizes; it takes ``num_each`` times what is asked for."""
    times = []
    for num_bytes in _BYTES:
        tensor = torch.zeros(num_bytes // 4, device=device.torch_device)
        seconds: list[float] = []
        for repeat in range(NUM_REPEATS + 1):
            dist.barrier()
            device.synchronize()
            marks = [device.mark()]
            work(tensor)
            marks.append(device.mark())
            device.synchronize()
            began, ended = device.seconds_of(marks)
            if repeat:
                seconds.append((ended - began) / num_each)
        times.append(Timed(num_bytes, 0.0, mean_of_ranks(median(seconds), mesh)))
    return fitted(times)


def mean_of_ranks(seconds: float, mesh: Mesh) -> float:
    """The mean over all ranks of what each has measured."""
    total = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(total, group=mesh.control_group)
    return float(total) / mesh.world_size


