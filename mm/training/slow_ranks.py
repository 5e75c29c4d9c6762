"""Finds slow ranks: compares how all ranks spend their steps, and writes the log lines and notes about it.

Steps of all ranks take equally long, because every rank waits for the slowest.  So the comparison is of a rank's own
time: its work, and its waits for samples that it reads itself.

Ranks of one tensor- and context-parallel group wait for each other in every layer: they are compared as one.  Replicas
do the same work at each stage, so a stage is compared with the same stage of the other replicas.  With one replica, its
stages are compared with each other.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mm.parallel.ranks import ranks_text

NUM_NAMED = 3
"""Slowest ranks that the log names."""
NUM_INTERVALS = 2
"""Log intervals in a row in which a rank must be slow to be noted."""
_INSTANT = 1e-9


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs."""

    rank: int
    stage: int
    replica: int
    host: str
    device: str


@dataclass(frozen=True)
class RankPace:
    """How a rank spent its time, in seconds per step."""

    work_seconds: float
    """Its own work: everything but the waits below."""
    data_seconds: float
    """Waits for samples that this rank reads itself."""
    wait_seconds: float
    """Waits for other ranks, for their samples too."""

    @property
    def own_seconds(self) -> float:
        return self.work_seconds + self.data_seconds


@dataclass(frozen=True)
class SlowRank:
    """A rank, or a tensor- and context-parallel group, and how much slower it is than the median of its peers."""

    ranks: tuple[int, ...]
    stage: int
    replica: int
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    work_seconds: float
    """As in ``RankPace``, of the slowest rank of the group, like the next two."""
    data_seconds: float
    wait_seconds: float
    median_seconds: float
    """Median of the own seconds (work and data) of those it is compared with."""
    compared_with: Literal["replicas", "stages"]
    """The same stage of the other replicas; or the other stages, if there is one replica."""
    share: float
    """Its own seconds over the median, less 1."""
    cause: Literal["work", "data"]
    """Which of the two is further above its median."""


@dataclass(frozen=True)
class ComparedRanks:
    """All ranks after a step with a log line; empty after other steps."""

    slowest: tuple[SlowRank, ...] = ()
    """All of them, slowest first; empty if there is only one."""
    num_steps: int = 0
    """Number of steps over which they were compared."""
    stage_memory_bytes: tuple[int, ...] = ()
    """Peak memory so far of each stage, on its rank with the most."""


def most_of_stages(places: Sequence[RankPlace], of_ranks: Sequence[int]) -> tuple[int, ...]:
    """The largest number of any rank of each stage; ``places`` and ``of_ranks`` are by rank."""
    found: dict[int, int] = {}
    for place, number in zip(places, of_ranks, strict=True):
        found[place.stage] = max(number, found.get(place.stage, 0))
    return tuple(found[stage] for stage in sorted(found))


def compare(places: Sequence[RankPlace], paces: Sequence[RankPace]) -> tuple[SlowRank, ...]:
    """All ranks, as tensor- and context-parallel groups, slowest first; empty if there is only one group.

    ``places`` and ``paces`` are by rank.
    """
    groups: dict[tuple[int, int], list[RankPlace]] = defaultdict(list)
    for place in places:
        groups[place.stage, place.replica].append(place)
    if len(groups) == 1:
        return ()
    has_replicas = len({replica for _, replica in groups}) > 1
    slowest = {key: max((paces[one.rank] for one in group), key=lambda pace: pace.own_seconds)
               for key, group in groups.items()}
    alike: dict[int, list[RankPace]] = defaultdict(list)
    for (stage, _), pace in slowest.items():
        alike[stage if has_replicas else 0].append(pace)
    medians = {key: _Medians(of_all) for key, of_all in alike.items()}
    found = [_compared(group, slowest[key], medians[key[0] if has_replicas else 0], has_replicas)
             for key, group in groups.items()]
    return tuple(sorted(found, key=lambda one: -one.share))


class _Medians:
    """Sorted seconds of some paces, for medians over all of them but one."""

    def __init__(self, paces: Sequence[RankPace]) -> None:
        self.own = sorted(pace.own_seconds for pace in paces)
        self.work = sorted(pace.work_seconds for pace in paces)
        self.data = sorted(pace.data_seconds for pace in paces)


def _compared(group: Sequence[RankPlace], pace: RankPace, medians: _Medians, has_replicas: bool) -> SlowRank:
    median = median_of_others(medians.own, pace.own_seconds)
    more_work = pace.work_seconds - median_of_others(medians.work, pace.work_seconds)
    more_data = pace.data_seconds - median_of_others(medians.data, pace.data_seconds)
    return SlowRank(
        ranks=tuple(one.rank for one in group),
        stage=group[0].stage,
        replica=group[0].replica,
        hosts=tuple(dict.fromkeys(one.host for one in group)),
        devices=tuple(dict.fromkeys(one.device for one in group)),
        work_seconds=pace.work_seconds,
        data_seconds=pace.data_seconds,
        wait_seconds=pace.wait_seconds,
        median_seconds=median,
        compared_with="replicas" if has_replicas else "stages",
        share=pace.own_seconds / max(median, _INSTANT) - 1,
        cause="data" if more_data > max(more_work, 0.0) else "work",
    )


def median_of_others(ascending: Sequence[float], value: float) -> float:
    """The median of ``ascending`` without one occurrence of ``value``."""
    out, num_others = bisect_left(ascending, value), len(ascending) - 1
    lower, upper = (ascending[index + (index >= out)] for index in ((num_others - 1) // 2, num_others // 2))
    return (lower + upper) / 2


class SlowRankNotes:
    """Notes each group that has been slow for ``NUM_INTERVALS`` log intervals in a row, once as long as it stays so."""

    def __init__(self, share: float) -> None:
        """``share``: a group is slow if it exceeds this."""
        self._share = share
        self._num_slow: Mapping[tuple[int, ...], int] = {}
        """By group: log intervals in a row in which it was slow, until now."""

    def after(self, found: Sequence[SlowRank]) -> list[str]:
        """The notes after another log interval, whose ranks are ``found``."""
        slow = [one for one in found if one.share > self._share]
        self._num_slow = {one.ranks: self._num_slow.get(one.ranks, 0) + 1 for one in slow}
        return [_note(one, self._share) for one in slow if self._num_slow[one.ranks] == NUM_INTERVALS]


def slowest_line(found: Sequence[SlowRank], num_steps: int) -> str:
    """The log line that names the slowest ranks."""
    return f" slowest ranks over the last {num_steps} steps: {'; '.join(map(_text, found[:NUM_NAMED]))}"


def _text(one: SlowRank) -> str:
    return (f"{_name(one)}: own work {_ms(one.work_seconds)}, data {_ms(one.data_seconds)} (median of the other "
            f"{one.compared_with} {_ms(one.median_seconds)}, {one.share:+.0%}), waits {_ms(one.wait_seconds)}")


def _note(one: SlowRank, share: float) -> str:
    is_plural = len(one.ranks) > 1
    excess = f"{one.share:.0%} more time a step than the median of the other {one.compared_with}"
    name, median = _name(one), _ms(one.median_seconds)
    more_work = "" if one.compared_with == "replicas" else (
        "there is only one replica, so this stage may have more work, and `mm-plan lists` finds more even "
        "pipeline_num_layers; if it has not, ")
    why = (
        f"of its {_ms(one.work_seconds + one.data_seconds)}, it waits {_ms(one.data_seconds)} for samples that it "
        f"reads itself (the median of work and data is {median}): look at that machine's disk and processors"
        if one.cause == "data" else
        f"its own work takes {_ms(one.work_seconds)} (the median of work and data is {median}): {more_work}look at "
        f"that device's clock and temperature, and at what else runs on that machine")
    return (f"note: {name} {'have' if is_plural else 'has'} taken {excess} in {NUM_INTERVALS} log intervals in a row, "
            f"which is above --slow-rank-share {share:g}; {why}")


def _name(one: SlowRank) -> str:
    hosts = f"host{'s' * (len(one.hosts) > 1)} {', '.join(one.hosts)}"
    return f"{ranks_text(one.ranks)} ({hosts}, {', '.join(one.devices)}, stage {one.stage})"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
