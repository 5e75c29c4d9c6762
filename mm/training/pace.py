"""Measures how this rank spends its steps, and gathers what all ranks measured.

Moments are marked on the device's clock and read a step later, when the device has passed them, so no step waits for
its measurement.  On an accelerator, a wait is how long the stream waited; on the CPU, how long the host waited.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from mm.device.device import Device
from mm.parallel.activity import Activity, Work
from mm.parallel.agreement import all_of
from mm.parallel.mesh import Mesh
from mm.timeline.spans import WAITS
from mm.training.slow_ranks import RankPace, RankPlace


class _Spent(Enum):
    """What a rank spends its time on."""

    WORK = "own work"
    DATA = "waits for data"
    WAIT = "waits for other ranks"
    PAUSE = "between steps"


class PaceMeter:
    """A listener that measures this rank's steps from the second on: the first compiles kernels."""

    def __init__(self, mesh: Mesh, device: Device) -> None:
        """Collective over all ranks, of which there are several."""
        self._mesh, self._device = mesh, device
        self._inside: list[_Spent] = []
        """What has begun and not ended; the outermost counts."""
        self._marks: list[tuple[Any, _Spent]] = []
        """Marks of the running step, each with what began then; empty during the first step."""
        self._ended: tuple[list[tuple[Any, _Spent]], float] | None = None
        """Marks of the step before, and its own wait for data."""
        self._seconds, self._num_steps = torch.zeros(3, dtype=torch.float64), 0
        """Work, data and waits, summed over the steps since the last ``gather``."""
        own = RankPlace(mesh.rank, mesh.pp_rank, mesh.dp_rank, socket.gethostname(), str(device.torch_device))
        self.places = all_of((own,), mesh.control_group)
        """Where each rank runs, by rank."""
        self.peak_bytes: tuple[int, ...] = ()
        """Peak memory of each rank at the last ``gather``."""

    def begin(self, activity: Activity) -> None:
        if (spent := _spent_on(activity)) is not _Spent.WORK:
            self._enter(spent)

    def end(self, activity: Activity) -> None:
        if _spent_on(activity) is not _Spent.WORK:
            self._leave()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        self._enter(_Spent.PAUSE)
        yield
        self._leave()

    def _enter(self, spent: _Spent) -> None:
        self._inside.append(spent)
        if len(self._inside) == 1:
            self._mark(spent)

    def _leave(self) -> None:
        self._inside.pop()
        if not self._inside:
            self._mark(_Spent.WORK)

    def _mark(self, spent: _Spent) -> None:
        if self._marks:
            self._marks.append((self._device.mark(), spent))

    def end_step(self, own_data_seconds: float) -> None:
        """Call when the host has read the step's gradient norm, so the device has passed the step before.

        ``own_data_seconds``: how long the host waited for samples that this rank reads itself.
        """
        boundary = (self._device.mark(), _Spent.WORK)
        if self._ended is not None:
            self._add(*self._ended)
        self._ended = ([*self._marks, boundary], own_data_seconds) if self._marks else None
        self._marks = [boundary]

    def _add(self, marks: list[tuple[Any, _Spent]], own_data_seconds: float) -> None:
        seconds = dict.fromkeys(_Spent, 0.0)
        gaps = self._device.seconds_between([mark for mark, _ in marks])
        for gap, (_, spent) in zip(gaps, marks, strict=False):
            seconds[spent] += gap
        own = min(own_data_seconds, seconds[_Spent.DATA])  # an accelerator may still be busy while the host waits
        others = seconds[_Spent.WAIT] + seconds[_Spent.DATA] - own
        self._seconds += torch.tensor([seconds[_Spent.WORK], own, others], dtype=torch.float64)
        self._num_steps += 1

    def gather(self) -> tuple[tuple[RankPace, ...], int]:
        """The paces of all ranks, by rank, over the steps since the last call, and the number of these steps.

        Collective over all ranks: each sends 32 bytes, with its peak memory.  If there were no steps, nothing is sent
        and there are no paces.
        """
        if not self._num_steps:
            return (), 0
        num_steps, mean = self._num_steps, self._seconds / self._num_steps
        own = torch.cat([mean, torch.tensor([self._device.max_memory_bytes()], dtype=torch.float64)])
        gathered = [torch.empty_like(own) for _ in range(self._mesh.world_size)]
        dist.all_gather(gathered, own, group=self._mesh.control_group)
        self._seconds, self._num_steps = torch.zeros_like(mean), 0
        self.peak_bytes = tuple(int(one[-1]) for one in gathered)
        return tuple(RankPace(*one[:-1].tolist()) for one in gathered), num_steps


def _spent_on(activity: Activity) -> _Spent:
    if activity.work is Work.DATA:
        return _Spent.DATA
    return _Spent.WAIT if activity.work in WAITS else _Spent.WORK
