"""Compares how long the ranks work in a step, and names the slowest in the log.

Steps of all ranks take equally long, because every rank waits for the slowest.  So a rank's own time is compared: its
work, and its waits for samples that it reads itself.  Events are recorded on the device's clock and read a step later,
so no step waits for its measurement.

Ranks of one tensor- and context-parallel group wait for each other in every layer: they are compared as one.  Replicas
do the same work at each stage, so a stage is compared with the same stage of the other replicas.  With one replica, its
stages are compared with each other, although they may differ in work.
"""

import socket
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from mm.device.device import Device
from mm.errors import counted
from mm.parallel.activity import Activity, Work
from mm.parallel.agreement import by_rank
from mm.parallel.health.heartbeat import ranks_text
from mm.parallel.mesh import Mesh
from mm.run.watch.watcher import Step, Watcher
from mm.timeline import WAITS

_NUM_NAMED = 3
"""Slowest ranks that the log names."""
_NUM_SPANS, _SPAN_STEPS, _SPAN_SECONDS = 5, 10, 24.0
"""A rank is noted if it is slow in this many spans in a row, each of so many steps and seconds; a stall is in one."""
_OWN, _PAUSE = "own work", "between steps"


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs."""

    rank: int
    stage: int
    replica: int
    host: str
    device: str


@dataclass(frozen=True)
class SlowRank:
    """A rank, or a tensor- and context-parallel group, and how much slower it is than the median of its peers."""

    ranks: tuple[int, ...]
    stage: int
    replica: int
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    own_seconds: float
    """Own time in a step, of the slowest rank of the group."""
    median_seconds: float
    """Median of those it is compared with."""
    compared_with: Literal["replicas", "stages"]
    """The same stage of the other replicas; or the other stages, if there is one replica."""
    share: float
    """Its own time over the median, less 1."""

    @property
    def name(self) -> str:
        hosts = f"host{'s' * (len(self.hosts) > 1)} {', '.join(self.hosts)}"
        return f"{ranks_text(self.ranks)} ({hosts}, {', '.join(self.devices)}, stage {self.stage})"


def compare(places: Sequence[RankPlace], own_seconds: Sequence[float]) -> tuple[SlowRank, ...]:
    """All ranks, as tensor- and context-parallel groups, slowest first; empty if there is only one group.  ``places``
    and ``own_seconds`` are by rank."""
    groups: dict[tuple[int, int], list[RankPlace]] = defaultdict(list)
    for place in places:
        groups[place.stage, place.replica].append(place)
    if len(groups) == 1:
        return ()
    has_replicas = len({replica for _, replica in groups}) > 1
    slowest = {key: max(own_seconds[one.rank] for one in group) for key, group in groups.items()}
    alike: dict[int, list[float]] = defaultdict(list)
    for (stage, _), seconds in sorted(slowest.items(), key=lambda both: both[1]):
        alike[stage * has_replicas].append(seconds)
    found = list[SlowRank]()
    for (stage, replica), group in groups.items():
        seconds = slowest[stage, replica]
        usual = median_of_others(alike[stage * has_replicas], seconds)
        found.append(SlowRank(
            tuple(one.rank for one in group), stage, replica, tuple(dict.fromkeys(one.host for one in group)),
            tuple(dict.fromkeys(one.device for one in group)), seconds, usual,
            "replicas" if has_replicas else "stages", seconds / max(usual, 1e-9) - 1))
    return tuple(sorted(found, key=lambda one: -one.share))


def median_of_others(ascending: Sequence[float], value: float) -> float:
    """The median of ``ascending`` without one occurrence of ``value``."""
    out, num_others = bisect_left(ascending, value), len(ascending) - 1
    lower, upper = (ascending[index + (index >= out)] for index in ((num_others - 1) // 2, num_others // 2))
    return (lower + upper) / 2


def slowest_line(found: Sequence[SlowRank], num_steps: int) -> str:
    """The log line that names the slowest ranks."""
    texts = (f"{one.name}: {1000 * one.own_seconds:.0f} ms, {one.share:+.0%} against the median of the other "
             f"{one.compared_with}" for one in found[:_NUM_NAMED])
    return f" slowest ranks over the last {counted(num_steps, 'step')}: {'; '.join(texts)}"


class SlowRankNotes:
    """Notes each rank that stays slower than the same stage of the other replicas by more than ``share``, once."""

    def __init__(self, places: Sequence[RankPlace], share: float) -> None:
        self._places, self._share = places, share
        self._span = torch.zeros(2 + len(places), dtype=torch.float64)  # steps, seconds, each rank's own seconds
        self._num_slow: dict[tuple[int, ...], int] = {}  # by ranks: slow spans in a row, until they are noted

    def after(self, num_steps: int, seconds: float, own_seconds: Sequence[float]) -> list[str]:
        """The notes after these steps, in which each rank worked for ``own_seconds``."""
        self._span += torch.tensor([num_steps, seconds, *own_seconds], dtype=torch.float64)
        if self._span[0] < _SPAN_STEPS or self._span[1] < _SPAN_SECONDS:
            return []
        slow = {one.ranks: one for one in compare(self._places, self._span[2:].tolist())
                if one.share > self._share and one.compared_with == "replicas"}
        self._span.zero_()
        noted = {ranks: num for ranks, num in self._num_slow.items() if num == _NUM_SPANS}
        self._num_slow = {ranks: self._num_slow.get(ranks, 0) + 1 for ranks in slow} | noted
        least = f"{_NUM_SPANS * _SPAN_STEPS} steps and {_NUM_SPANS * _SPAN_SECONDS:.0f} s"
        return [f"note: {one.name}: {one.share:.0%} more time a step than the median of the other replicas, for at "
                f"least {least} (--slow-rank-share {self._share:g}); look at its clock and its disk"
                for ranks, one in slow.items() if self._num_slow[ranks] == _NUM_SPANS and ranks not in noted]


class StepTiming(Watcher):
    """A listener that measures this rank's steps from the second on, because the first compiles kernels.  At steps with
    a log line, all ranks compare their own times and their peak memory."""

    def __init__(self, mesh: Mesh, device: Device, log_interval: int, slow_rank_share: float,
                 names_slowest: bool = True) -> None:
        """Collective over all ranks.  ``names_slowest``: with each log line, not only in notes."""
        self._names_slowest = names_slowest
        self._mesh, self._device, self._log_interval = mesh, device, log_interval
        self._depth = 0
        """Number of waits and pauses that have begun and not ended; the outermost counts."""
        self._events: list[tuple[Any, Work | str]] = []
        """Events of the running step, each with what begins then; empty during the first."""
        self._ended: tuple[list[tuple[Any, Work | str]], float] | None = None
        """Events of the step before, and its own wait for data."""
        self._own_seconds, self._seconds, self._num_steps = 0.0, 0.0, 0
        """Own time, duration and number of the steps since the last comparison."""
        own = RankPlace(mesh.rank, mesh.pp_rank, mesh.dp_rank, socket.gethostname(), str(device.torch_device))
        self._places = by_rank(mesh, own)
        self._notes = SlowRankNotes(self._places, slow_rank_share)

    def begin(self, activity: Activity) -> None:
        if activity.work is Work.DATA or activity.work in WAITS:
            self._enter(activity.work)

    def end(self, activity: Activity) -> None:
        if activity.work is Work.DATA or activity.work in WAITS:
            self._leave()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._enter(_PAUSE)
        yield
        self._leave()

    def _enter(self, what: Work | str) -> None:
        if self._events and not self._depth:
            self._events.append((self._device.runtime.record_event(), what))
        self._depth += 1

    def _leave(self) -> None:
        self._depth -= 1
        if self._events and not self._depth:
            self._events.append((self._device.runtime.record_event(), _OWN))

    def after(self, step: Step) -> None:
        """The host has read the step's gradient norm, so the device has passed the step before."""
        boundary = (self._device.runtime.record_event(), _PAUSE if self._depth else _OWN)
        if self._ended is not None:
            self._add(*self._ended)
        self._ended = ([*self._events, boundary], step.own_data_seconds) if self._events else None
        self._events = [boundary]
        if step.progress.iteration % self._log_interval == 0:
            self._compare(step)

    def _add(self, events: list[tuple[Any, Work | str]], own_data_seconds: float) -> None:
        seconds: dict[Work | str, float] = defaultdict(float)
        gaps = self._device.runtime.seconds_between([event for event, _ in events])
        for gap, (_, what) in zip(gaps, events, strict=False):
            seconds[what] += gap
        # an accelerator may still be busy while the host waits
        self._own_seconds += seconds[_OWN] + min(own_data_seconds, seconds[Work.DATA])
        self._seconds += sum(seconds.values()) - seconds[_PAUSE]
        self._num_steps += 1

    def _compare(self, step: Step) -> None:
        """Add the slowest ranks and the stages' peak memory to ``step``; each rank sends 16 bytes."""
        own = torch.tensor([self._own_seconds, self._device.runtime.max_memory_bytes()], dtype=torch.float64)
        of_ranks = [torch.empty_like(own) for _ in range(self._mesh.world_size)]
        dist.all_gather(of_ranks, own, group=self._mesh.control_group)
        peaks: dict[int, int] = {}
        for place, one in zip(self._places, of_ranks, strict=True):
            peaks[place.stage] = max(peaks.get(place.stage, 0), int(one[1]))
        step.measured["stage_memory_bytes"] = tuple(peaks[stage] for stage in sorted(peaks))
        num_steps, seconds, own_seconds = self._num_steps, self._seconds, [float(one[0]) for one in of_ranks]
        self._own_seconds, self._seconds, self._num_steps = 0.0, 0.0, 0
        if num_steps and (slowest := compare(self._places, [one / num_steps for one in own_seconds])):
            step.measured |= {"slowest_rank_share": slowest[0].share, "slowest_ranks": slowest[:_NUM_NAMED]}
            step.lines += [*[slowest_line(slowest, num_steps)] * self._names_slowest,
                           *self._notes.after(num_steps, seconds, own_seconds)]
