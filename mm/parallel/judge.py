"""Decides from what ranks last wrote about themselves whether all of them must end, and why.  Knows no store."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from mm.parallel.ranks import death_of, ranks_text
from mm.process import Identity, began, node_id

SILENT_SECONDS = 300.0
"""How long a rank may give no sign of life if no time limit has passed: Python's GIL may be held for minutes."""
_GRACE_OF_LIMIT = 3.0
"""Seconds after a limit in which its rank may report that itself."""


@dataclass(frozen=True)
class Cause:
    """Why all ranks end."""

    rank: int
    text: str = ""
    """What is printed; empty when the rank reports it itself."""
    status: int = 1
    """0: all ranks have left normally; 2: a user's mistake, so the report leaves out where the ranks were."""
    shows_stacks: bool = False
    """Whether the report shows the stacks of all ranks, because the text alone does not explain the cause."""
    reporter: int = -1
    """The rank that has found it."""


State = Literal["joined", "ready", "begun", "leaving"]
"""What a rank has reached; "ready": it waits for the others; "begun", on rank 0: all were ready; "leaving": its part
has ended."""


@dataclass(frozen=True)
class Record:
    """What a rank says about itself."""

    count: int = 0
    """How many records it has written; 0: it has not joined yet."""
    state: State = "joined"
    place: str = "has not joined the others"
    seconds_left: float | None = None
    """Until its time limit."""
    lateness: str = ""
    """What to report when the limit has passed."""
    lost: str = ""
    """An error that another rank's death may have caused."""
    process: Identity = ("", 0, "")
    stacks: str | None = None
    """Once it has been told that the run ends."""

    @property
    def is_there(self) -> bool:
        return self.count > 0 and self.state != "leaving"

    @classmethod
    def read(cls, text: str) -> "Record":
        found = json.loads(text)
        return cls(**found | {"process": tuple(found["process"])})

    def text(self) -> str:
        return json.dumps(asdict(self))


def has_ended(process: Identity) -> bool:
    """Whether a process is known to have ended: only for processes of this machine."""
    node, pid, start = process
    return node == node_id("pid") and began(pid) != start


class Judge:
    """Follows the ranks whose records this rank reads: rank 0 those of all, others that of rank 0 and of their node."""

    def __init__(
        self, rank: int, num_ranks: int, start_seconds: float, end_seconds: float, doubt_seconds: float
    ) -> None:
        """Arguments:

        - ``start_seconds``: how long other ranks may take to be ready after rank 0 is
        - ``end_seconds``: how long ranks may take to leave after the first has left
        - ``doubt_seconds``: how long an error of communication waits for the death or silence that explains it
        """
        self._rank, self._num_ranks = rank, num_ranks
        self._start_seconds, self._end_seconds, self._doubt_seconds = start_seconds, end_seconds, doubt_seconds
        self._changed: dict[int, tuple[int, float]] = {}
        """By rank: its latest count, and when that was new."""
        self._since: dict[str, float] = {}
        """When something was first seen."""

    def cause(self, records: Mapping[int, Record], now: float) -> Cause | None:
        """The reason to end all ranks, at the time ``now``."""
        for rank, record in records.items():
            if self._changed.get(rank, (-1, 0.0))[0] != record.count:
                self._changed[rank] = record.count, now
        return (self._death(records) or self._loss(records, now) or self._silence(records, now)
                or (self._absence(records, now) or self._late_end(records, now) if self._rank == 0 else None))

    def _death(self, records: Mapping[int, Record]) -> Cause | None:
        return next((Cause(rank, death_of(rank)) for rank, record in records.items()
                     if record.is_there and has_ended(record.process)), None)

    def _loss(self, records: Mapping[int, Record], now: float) -> Cause | None:
        """A rank whose communication has failed; rather one that has been silent since then."""
        lost = {rank: record for rank, record in records.items() if record.is_there and record.lost}
        if not lost or now < self._first_seen("loss", now) + self._doubt_seconds:
            return None
        rank = min(lost)
        silent = [one for one, (_, since) in self._changed.items()
                  if one in records and records[one].is_there and now - since > 0.9 * self._doubt_seconds]
        if silent:
            return Cause(silent[0], f"{ranks_text(silent)} gave no sign of life for {self._doubt_seconds:.0f} s after "
                                    f"{lost[rank].lost}", shows_stacks=True)
        if self._rank == 0:  # it knows of all ranks
            return Cause(rank, f"{lost[rank].lost}\nNo rank gives a reason for its failure.", shows_stacks=True)
        return None

    def _silence(self, records: Mapping[int, Record], now: float) -> Cause | None:
        """A rank that has passed its limit and cannot say so itself, or is silent for long."""
        for rank, record in records.items():
            silent = now - self._changed[rank][1]
            if not record.is_there:
                continue
            if record.seconds_left is not None and silent > record.seconds_left + _GRACE_OF_LIMIT:
                return Cause(rank, record.lateness, shows_stacks=True)
            if silent > SILENT_SECONDS:
                return Cause(rank, f"rank {rank} has given no sign of life for {silent:.0f} s", shows_stacks=True)
        return None

    def _absence(self, records: Mapping[int, Record], now: float) -> Cause | None:
        missing = _not_in(records, ("ready", "begun", "leaving"))
        if 0 in missing or not missing or now < self._first_seen("ready", now) + self._start_seconds:
            return None
        return Cause(missing[0], f"{ranks_text(missing)} of {self._num_ranks} did not connect within "
                                 f"{self._start_seconds / 60:g} minutes after rank 0; see the output of their "
                                 f"launchers, and --distributed-timeout-minutes")

    def _late_end(self, records: Mapping[int, Record], now: float) -> Cause | None:
        late = _not_in(records, ("leaving",))
        if not late:
            return Cause(0, status=0)
        if len(late) == self._num_ranks or now < self._first_seen("end", now) + self._end_seconds:
            return None
        return Cause(late[0], f"{ranks_text(late)} did not end within {self._end_seconds:.0f} s after the first; "
                              f"--phase-timeouts between=SECONDS sets this limit", shows_stacks=True)

    def _first_seen(self, what: str, now: float) -> float:
        return self._since.setdefault(what, now)


def _not_in(records: Mapping[int, Record], states: Sequence[str]) -> list[int]:
    return [rank for rank, record in sorted(records.items()) if not record.count or record.state not in states]
