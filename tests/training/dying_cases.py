"""The failed runs of tests/training/test_dying.py."""

from dataclasses import dataclass

SPLIT = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
INTERVAL = ("--save-interval", "2")


@dataclass(frozen=True)
class Case:
    """What happens to one of two ranks in a backward pass of one iteration."""

    name: str
    num_stages: int
    flags: tuple[str, ...] = ()
    fault: str = ""
    """Empty: nothing, for a run that the others are compared with."""
    iteration: int = 3
    rank: int = 1
    like: str = ""
    """The undisturbed run of the same layout."""


CASES = (
    Case("replicas", 1),
    Case("shards", 1, (*SPLIT, "--bf16")),
    Case("stages", 2),
    Case("killed replica", 1, INTERVAL, "killed", iteration=6, like="replicas"),
    Case("stopped replica", 1, (), "stopped", like="replicas"),
    Case("failed shard", 1, (*SPLIT, "--bf16", "--optimizer-cpu-offload"), "raises", iteration=4, like="shards"),
    Case("killed shard", 1, (*SPLIT, "--bf16", *INTERVAL), "killed", iteration=4, like="shards"),
    Case("stage with a mistake", 2, (), "user's mistake", like="stages"),
    Case("killed stage", 2, INTERVAL, "killed", iteration=4, like="stages"),
    Case("saved replica", 1, INTERVAL, "killed", iteration=5, like="replicas"),
    Case("forbidden", 1, (*INTERVAL, "--phase-timeouts", "dying=0"), "killed", iteration=6, like="replicas"),
)
