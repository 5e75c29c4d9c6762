"""Times messages, sums and copies between the ranks of this job and their hosts."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from mm.cost.linear_costs import Law, Timed, fitted
from mm.device.device import Device
from mm.parallel.mesh import Mesh

_NUM_REPEATS = 9
_BYTES = (4 << 10, 256 << 10, 2 << 20, 16 << 20)
_COPIED_BYTES = 64 << 20


def seconds_of(device: Device, mesh: Mesh, work: Callable[[], object] | None, num_repeats: int = _NUM_REPEATS) -> float:
    """The median of ``num_repeats`` calls of ``work`` that all ranks begin together, after one that warms up; the mean
    of the ranks, except those whose ``work`` is None."""
    seconds: list[float] = []
    for _ in range(num_repeats + 1):
        dist.barrier()
        device.runtime.synchronize()
        marks = [device.runtime.mark()]
        if work is not None:
            work()
        marks.append(device.runtime.mark())
        device.runtime.synchronize()
        began, ended = device.runtime.seconds_of(marks)
        seconds.append(ended - began)
    return mean_of_ranks(None if work is None else median(seconds[1:]), mesh)


def mean_of_ranks(seconds: float | None, mesh: Mesh) -> float:
    """The mean of what the ranks have measured; a rank that has measured nothing gives None."""
    totals = torch.tensor([0.0, 0.0] if seconds is None else [seconds, 1.0], dtype=torch.float64)
    dist.all_reduce(totals, group=mesh.control_group)
    total, num_ranks = totals.tolist()
    return total / num_ranks


def message_law(device: Device, mesh: Mesh) -> Law | None:
    """One message from a rank to the next, by bytes; None with one rank."""
    if mesh.world_size == 1:
        return None
    other = mesh.rank ^ 1

    def there_and_back(tensor: torch.Tensor) -> None:
        for is_sender in (mesh.rank % 2 == 0, mesh.rank % 2 == 1):
            (dist.send if is_sender else dist.recv)(tensor, other)

    return _law_by_bytes(device, mesh, there_and_back if other < mesh.world_size else None) * 0.5


def all_reduce_laws(device: Device, mesh: Mesh) -> dict[int, Law]:
    """The sum over a group, by bytes, for every group size that is a power of two, and for the whole world."""
    found = {}
    for size in sorted({mesh.world_size, *(1 << power for power in range(1, mesh.world_size.bit_length()))} - {1}):
        groups = [list(range(first, first + size)) for first in range(0, mesh.world_size - size + 1, size)]
        group, _ = dist.new_subgroups_by_enumeration(groups, timedelta(minutes=5))
        assert not isinstance(group, int), "torch gives a number only to ranks outside of a group"
        found[size] = _law_by_bytes(device, mesh, None if group is None else partial(dist.all_reduce, group=group))
        if group is not None:
            dist.destroy_process_group(group)
    return found


def host_bytes_per_second(device: Device, mesh: Mesh) -> float:
    """Bytes per second copied from pinned memory of the host while all ranks copy."""
    target = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device.torch_device)
    source = device.runtime.pin(torch.ones(_COPIED_BYTES, dtype=torch.uint8))
    return _COPIED_BYTES / seconds_of(device, mesh, lambda: target.copy_(source, non_blocking=True))


def _law_by_bytes(device: Device, mesh: Mesh, work: Callable[[torch.Tensor], object] | None) -> Law:
    """The law of ``work``, which is None on the ranks that have no part in it, on tensors of several sizes."""
    times = []
    for num_bytes in _BYTES:
        tensor = torch.zeros(num_bytes // 4, device=device.torch_device)
        times.append(Timed(num_bytes, 0.0, seconds_of(device, mesh, None if work is None else partial(work, tensor))))
    return fitted(times)
