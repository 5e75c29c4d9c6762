"""Measures this rank's own time in its steps, without its waits for others, and gathers that of all ranks.

Moments are marked on the device's clock and read a step later, when the device has passed them, so no step waits for
its measurement.  On an accelerator, a wait is how long the stream waited; on the CPU, how long the host waited.
"""

import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mm.device.device import Device
from mm.parallel.activity import Activity, Work
from mm.parallel.agreement import all_of
from mm.parallel.mesh import Mesh
from mm.timeline.spans import WAITS
from mm.training.slow_ranks import Pace, RankPlace

_OWN, _PAUSE = "own work", "between steps"
_Mark = tuple[Any, Work | str]
"""A moment, and what begins then: one of the above, or a wait."""


class PaceMeter:
    """A listener that measures this rank's steps from the second on: the first compiles kernels."""

    def __init__(self, mesh: Mesh, device: Device) -> None:
        """Collective over all ranks, of which there are several."""
        self._mesh, self._device = mesh, device
        self._depth = 0
        """Number of waits and pauses that have begun and not ended; the outermost counts."""
        self._marks: list[_Mark] = []
        """Marks of the running step; empty during the first."""
        self._ended: tuple[list[_Mark], float] | None = None
        """Marks of the step before, and its own wait for data."""
        self._own, self._seconds, self._num_steps = 0.0, 0.0, 0
        """Own time, duration and number of the steps since the last ``gather``."""
        own = RankPlace(mesh.rank, mesh.pp_rank, mesh.dp_rank, socket.gethostname(), str(device.torch_device))
        self.places = all_of((own,), mesh.control_group)
        """Where each rank runs, by rank."""
        self.peak_bytes: tuple[int, ...] = ()
        """Peak memory of each rank at the last ``gather``."""

    def begin(self, activity: Activity) -> None:
        if activity.work is Work.DATA or activity.work in WAITS:
            self._enter(activity.work)

    def end(self, activity: Activity) -> None:
        if activity.work is Work.DATA or activity.work in WAITS:
            self._leave()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        self._enter(_PAUSE)
        yield
        self._leave()

    def _enter(self, what: Work | str) -> None:
        if self._marks and not self._depth:
            self._marks.append((self._device.runtime.mark(), what))
        self._depth += 1

    def _leave(self) -> None:
        self._depth -= 1
        if self._marks and not self._depth:
            self._marks.append((self._device.runtime.mark(), _OWN))

    def end_step(self, own_data_seconds: float) -> None:
        """Call when the host has read the step's gradient norm, so the device has passed the step before.

        ``own_data_seconds``: how long the host waited for samples that this rank reads itself.
        """
        boundary = (self._device.runtime.mark(), _OWN)
        if self._ended is not None:
            self._add(*self._ended)
        self._ended = ([*self._marks, boundary], own_data_seconds) if self._marks else None
        self._marks = [boundary]

    def _add(self, marks: list[_Mark], own_data_seconds: float) -> None:
        seconds: dict[Work | str, float] = defaultdict(float)
        gaps = self._device.runtime.seconds_between([mark for mark, _ in marks])
        for gap, (_, what) in zip(gaps, marks, strict=False):
            seconds[what] += gap
        # an accelerator may still be busy while the host waits
        self._own += seconds[_OWN] + min(own_data_seconds, seconds[Work.DATA])
        self._seconds += sum(seconds.values()) - seconds[_PAUSE]
        self._num_steps += 1

    def gather(self) -> Pace | None:
        """The own time of all ranks over the steps since the last call.

        Collective over all ranks: each sends 16 bytes, with its peak memory.  If there were no steps, nothing is sent.
        """
        if not self._num_steps:
            return None
        num_steps, seconds = self._num_steps, self._seconds
        own = torch.tensor([self._own / num_steps, self._device.runtime.max_memory_bytes()], dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(self._mesh.world_size)]
        dist.all_gather(gathered, own, group=self._mesh.control_group)
        self._own, self._seconds, self._num_steps = 0.0, 0.0, 0
        self.peak_bytes = tuple(int(one[1]) for one in gathered)
        return Pace(tuple(float(one[0]) for one in gathered), num_steps, seconds)
