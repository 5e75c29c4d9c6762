"""Finds slow ranks: compares how long all ranks work in a step, for the log line and for a note.

Steps of all ranks take equally long, because every rank waits for the slowest.  So the comparison is of a rank's own
time: its work, and its waits for samples that it reads itself.

Ranks of one tensor- and context-parallel group wait for each other in every layer: they are compared as one.  Replicas
do the same work at each stage, so a stage is compared with the same stage of the other replicas.  With one replica, its
stages are compared with each other; they may differ in work, so none is noted.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mm.errors import counted
from mm.parallel.heartbeat import ranks_text

NUM_NAMED = 3
"""Slowest ranks that the log names."""
NUM_SPANS, SPAN_STEPS, SPAN_SECONDS = 5, 10, 24.0
"""A rank is noted if it is slow in so many spans in a row, each of at least so many steps and seconds.  A stall, or the
noise of a few steps, is in one of them only."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs."""

    rank: int
    stage: int
    replica: int
    host: str
    device: str


@dataclass(frozen=True)
class Pace:
    """The ranks' own time between two log lines."""

    own_seconds: tuple[float, ...]
    """Mean over the steps, by rank."""
    num_steps: int
    seconds: float
    """Duration of these steps."""


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


@dataclass(frozen=True)
class ComparedRanks:
    """All ranks after a step with a log line; empty after other steps."""

    slowest: tuple[SlowRank, ...] = ()
    """All of them, slowest first; empty if there is only one."""
    num_steps: int = 0
    """Number of steps over which they were compared."""
    notes: tuple[str, ...] = ()
    """On ranks that have turned out to be slow."""
    stage_memory_bytes: tuple[int, ...] = ()
    """Peak memory so far of each stage, on its rank with the most."""


def most_of_stages(places: Sequence[RankPlace], of_ranks: Sequence[int]) -> tuple[int, ...]:
    """The largest number of any rank of each stage; ``places`` and ``of_ranks`` are by rank."""
    found: dict[int, int] = {}
    for place, number in zip(places, of_ranks, strict=True):
        found[place.stage] = max(number, found.get(place.stage, 0))
    return tuple(found[stage] for stage in sorted(found))


def compare(places: Sequence[RankPlace], own_seconds: Sequence[float]) -> tuple[SlowRank, ...]:
    """All ranks, as tensor- and context-parallel groups, slowest first; empty if there is only one group.

    ``places`` and ``own_seconds`` are by rank.
    """
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


class SlowRankNotes:
    """Notes each rank that stays slower than the same stage of the other replicas, once."""

    def __init__(self, places: Sequence[RankPlace], share: float) -> None:
        """``share``: a rank is slow if it exceeds this."""
        self._places, self._share = places, share
        self._paces = list[Pace]()
        """Paces measured in the present span."""
        self._num_slow: dict[tuple[int, ...], int] = {}
        """By ranks: spans in a row, until now, in which they were slow."""
        self._noted = set[tuple[int, ...]]()

    def after(self, pace: Pace) -> tuple[str, ...]:
        """The notes after the steps of ``pace``."""
        self._paces.append(pace)
        num_steps = sum(one.num_steps for one in self._paces)
        if num_steps < SPAN_STEPS or sum(one.seconds for one in self._paces) < SPAN_SECONDS:
            return ()
        sums = (sum(one.num_steps * one.own_seconds[place.rank] for one in self._paces) for place in self._places)
        slow = [one for one in compare(self._places, [total / num_steps for total in sums])
                if one.share > self._share and one.compared_with == "replicas"]
        self._paces.clear()
        self._num_slow = {one.ranks: self._num_slow.get(one.ranks, 0) + 1 for one in slow}
        new = [one for one in slow if self._num_slow[one.ranks] >= NUM_SPANS and one.ranks not in self._noted]
        self._noted.update(one.ranks for one in new)
        return tuple(map(self._note, new))

    def _note(self, one: SlowRank) -> str:
        return (f"note: {one.name} {'have' if len(one.ranks) > 1 else 'has'} taken {one.share:.0%} more time a step "
                f"than the median of the other replicas, for at least {NUM_SPANS * SPAN_STEPS} steps and "
                f"{NUM_SPANS * SPAN_SECONDS:.0f} s, which is above --slow-rank-share {self._share:g}; look at that "
                f"device's clock and temperature, at the disk of its samples, and at what else runs on that machine")


def slowest_line(found: Sequence[SlowRank], num_steps: int) -> str:
    """The log line that names the slowest ranks."""
    texts = (f"{one.name}: {1000 * one.own_seconds:.0f} ms, {one.share:+.0%} against the median of the other "
             f"{one.compared_with}" for one in found[:NUM_NAMED])
    return f" slowest ranks over the last {counted(num_steps, 'step')}: {'; '.join(texts)}"
