"""What tests/parallel/test_watchdog.py lets happen to a run."""

from dataclasses import dataclass

from mm.parallel.activity import Work


@dataclass(frozen=True)
class Fault:
    """What happens on one of two ranks in the second step, or before the first process group is made."""

    name: str
    kind: str
    rank: int = 1
    work: Work = Work.BACKWARD
    flags: tuple[str, ...] = ()


FAULTS = (
    Fault("sleeps", "sleeps", flags=("--step-timeout", "8", "--check-p2p")),
    Fault("killed", "killed"),
    Fault("killed with the hub", "killed", rank=0, work=Work.FORWARD),
    Fault("raises", "raises", work=Work.LANGUAGE_FORWARD),
    Fault("user's mistake", "user's mistake"),
    Fault("refused before the start", "refused", rank=0, flags=("--freeze-modules", "no_such_word")),
    Fault("killed before the start", "killed before", rank=0),
    Fault("interrupted", "interrupted", work=Work.DATA),
    Fault("interrupted alone", "interrupted alone", work=Work.LANGUAGE_FORWARD),
    Fault("wrong shape", "wrong shape", work=Work.DATA, flags=("--check-p2p",)),
)
