"""How ``mm-plan calibrate`` times work that all ranks of this job begin together."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from mm.device.device import Device
from mm.parallel.mesh import Mesh


def repeated_seconds(device: Device, num_repeats: int, work: Callable[[], object]) -> list[float]:
    """Seconds of each of ``num_repeats`` calls of ``work``, after one that warms up."""
    seconds: list[float] = []
    for _ in range(num_repeats + 1):
        dist.barrier()
        device.runtime.synchronize()
        marks = [device.runtime.mark()]
        work()
        marks.append(device.runtime.mark())
        device.runtime.synchronize()
        began, ended = device.runtime.seconds_of(marks)
        seconds.append(ended - began)
    return seconds[1:]


def mean_of_ranks(seconds: float | None, mesh: Mesh) -> float:
    """The mean of what the ranks have measured; a rank that has measured nothing gives None."""
    totals = torch.tensor([0.0, 0.0] if seconds is None else [seconds, 1.0], dtype=torch.float64)
    dist.all_reduce(totals, group=mesh.control_group)
    total, num_ranks = totals.tolist()
    return total / num_ranks
