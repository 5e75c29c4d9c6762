"""Who writes what of a dying checkpoint."""

from hypothesis import given
from hypothesis import strategies as st

from mm.parallel.rescue import Holdings, RescuePlan, plan_rescue, rescue

# Two stages, two replicas; rank = replica + 2 * stage.
REPLICAS = {rank: Holdings((f"w{rank // 2}",), (f"o{rank // 2}",)) for rank in range(4)}
SHARDS = {rank: Holdings((f"w{rank // 2}",), (f"o{rank // 2}.{rank % 2}",)) for rank in range(4)}


def test_each_file_has_one_writer() -> None:
    assert plan_rescue(REPLICAS, dict.fromkeys(range(4), 7)) == RescuePlan(7, {0: ("w0", "o0"), 2: ("w1", "o1")}, ())
    assert plan_rescue(REPLICAS, {0: 7, 3: 7}) == RescuePlan(7, {0: ("w0", "o0"), 3: ("w1", "o1")}, ())
    assert plan_rescue(SHARDS, dict.fromkeys(range(4), 7)) == RescuePlan(
        7, {0: ("w0", "o0.0"), 1: ("o0.1",), 2: ("w1", "o1.0"), 3: ("o1.1",)}, ())


def test_without_a_shard_only_weights_are_written() -> None:
    assert plan_rescue(SHARDS, {0: 7, 1: 7, 3: 7}) == RescuePlan(7, {0: ("w0",), 3: ("w1",)}, (2,))


def test_a_stage_that_nobody_holds_leaves_nothing() -> None:
    assert plan_rescue(REPLICAS, {0: 7, 1: 7}) == (2, 3)
    assert plan_rescue(REPLICAS, {0: 7, 1: 7, 2: 6, 3: 8}) == (2, 3)


def test_rank_0_must_hold_a_state() -> None:
    assert not isinstance(plan_rescue(REPLICAS, {1: 7, 2: 7, 3: 7}), RescuePlan)
    assert not isinstance(plan_rescue(REPLICAS, {}), RescuePlan)


class ScriptedLines:
    """Messages as they arrive; what is sent goes nowhere."""

    def __init__(self, *arriving: list) -> None:
        self.arriving = list(arriving)

    def send(self, *_: object) -> None: ...

    def receive(self, _: float) -> list:
        return self.arriving.pop(0)


class RankZero:
    """Rank 0's part of a rescue, which only records what it commits."""

    def create(self) -> str:
        return "folder"

    def commit(self, _folder: str, written: list, _has_states: bool) -> str:
        return f"wrote {written}"


def test_only_the_writers_of_a_checkpoint_are_listened_to() -> None:
    """Anyone on the network may connect to the hub, and has a negative number until its token is checked."""
    lines = ScriptedLines([(-1, ["saved", None, ["forged"]]), (2, ["saved", "I write nothing", []])],
                          [(-1, ["saved", "forged", []]), (1, ["saved", None, ["w0"]])])
    plan = RescuePlan(7, {1: ("w0",)}, ())
    assert rescue(plan, RankZero(), lines, [0, 1, 2], 60.0) == (
        "note: the surviving ranks saved iteration 7: wrote ['w0']")


@given(st.dictionaries(st.integers(0, 3), st.integers(1, 2)), st.sampled_from([REPLICAS, SHARDS]))
def test_a_plan_covers_the_model_from_one_iteration(held: dict[int, int], holdings: dict[int, Holdings]) -> None:
    plan = plan_rescue(holdings, held)
    if not isinstance(plan, RescuePlan):
        return
    written = [file for files in plan.files.values() for file in files]
    wanted = {file for one in holdings.values()
              for file in (one.weights if plan.lost_states else one.weights + one.states)}
    assert sorted(written) == sorted(wanted)
    for rank, files in plan.files.items():
        assert held[rank] == plan.iteration == held[0]
        assert set(files) <= set(holdings[rank].weights + holdings[rank].states)
