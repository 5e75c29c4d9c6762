"""Which rank is called slow, and why; in real processes: tests/training/test_packing.py."""

import time
from itertools import pairwise, product
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.device.device import Device
from mm.parallel.activity import Journal, Work
from mm.training.slow_ranks import (
    RankPace,
    RankPlace,
    SlowRankNotes,
    compare,
    median_of_others,
    slowest_line,
)


def layout(num_stages: int, num_replicas: int, num_cut: int = 1) -> list[RankPlace]:
    """Places in Megatron's order: ranks of a group first, then replicas, then stages; eight ranks on a machine."""
    slots = product(range(num_stages), range(num_replicas), range(num_cut))
    return [RankPlace(rank, stage, replica, f"n{rank // 8}", f"npu:{rank % 8}")
            for rank, (stage, replica, _) in enumerate(slots)]


@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 2), st.data())
def test_the_rank_that_is_slower_than_its_peers_comes_first(
    num_stages: int, num_replicas: int, num_cut: int, data: st.DataObject
) -> None:
    """However much the stages' work differs, and all others by up to 10%."""
    places = layout(num_stages, num_replicas, num_cut)
    of_stage = data.draw(st.lists(st.floats(0.01, 10.0), min_size=num_stages, max_size=num_stages))
    noise = data.draw(st.lists(st.floats(1.0, 1.1), min_size=len(places), max_size=len(places)))
    paces = [RankPace(of_stage[place.stage] * factor, 0.0, 1.0) for place, factor in zip(places, noise, strict=True)]
    slow = data.draw(st.sampled_from(places))
    cause = data.draw(st.sampled_from(["work", "data"]))
    own = of_stage[slow.stage]
    paces[slow.rank] = RankPace(1.5 * own, 0.0, 0.0) if cause == "work" else RankPace(own, 0.5 * own, 0.0)
    first, *others = compare(places, paces)
    assert (first.stage, first.replica, first.cause) == (slow.stage, slow.replica, cause) and slow.rank in first.ranks
    assert first.share > 0.3 and all(one.share < 0.11 for one in others)
    assert sorted(rank for one in (first, *others) for rank in one.ranks) == [place.rank for place in places]


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5, 4.0, 9.0]), min_size=2, max_size=9), st.data())
def test_the_median_leaves_the_rank_itself_out(values: list[float], data: st.DataObject) -> None:
    one = data.draw(st.integers(0, len(values) - 1))
    expected = median(values[:one] + values[one + 1 :])
    assert median_of_others(sorted(values), values[one]) == expected


def test_a_single_replica_is_compared_by_stage_and_a_single_group_not_at_all() -> None:
    found = compare(layout(3, 1), [RankPace(1.0, 0.0, 0.5), RankPace(1.5, 0.0, 0.0), RankPace(1.0, 0.0, 0.5)])
    assert (found[0].ranks, found[0].compared_with) == ((1,), "stages") and found[0].share == pytest.approx(0.5)
    assert compare(layout(1, 1, 4), [RankPace(float(rank), 0.0, 0.0) for rank in range(4)]) == ()


def test_the_line_and_the_note_name_rank_host_device_and_stage() -> None:
    places, alike = layout(2, 4), RankPace(0.64, 0.0, 0.2)
    paces = [RankPace(0.8128, 0.0, 0.031) if place.rank == 5 else alike for place in places]
    found = compare(places, paces)
    assert slowest_line(found, 10).startswith(
        " slowest ranks over the last 10 steps: rank 5 (host n0, npu:5, stage 1): own work 813 ms, data 0 ms (median "
        "of the other replicas 640 ms, +27%), waits 31 ms; ")
    assert slowest_line(found, 10).count("; ") == 2
    notes = SlowRankNotes(0.2)
    assert notes.after(found) == []
    (note,) = notes.after(found)
    assert note.startswith(
        "note: rank 5 (host n0, npu:5, stage 1) has taken 27% more time a step than the median of the other replicas "
        "in 2 log intervals in a row, which is above --slow-rank-share 0.2; its own work takes 813 ms (the median of "
        "work and data is 640 ms)")
    assert notes.after(found) == []  # it has been said
    assert notes.after(compare(places, [alike] * 8)) == notes.after(found) == []
    assert len(notes.after(found)) == 1  # and has become slow again
    assert SlowRankNotes(0.3).after(found) == []


def test_a_note_names_a_groups_ranks_and_its_data() -> None:
    places = layout(1, 4, 4)
    paces = [RankPace(1.0, 0.5 if place.rank == 8 else 0.0, 0.0) for place in places]
    notes = SlowRankNotes(0.2)
    notes.after(compare(places, paces))
    (note,) = notes.after(compare(places, paces))
    assert "ranks 8 to 11 (host n1, npu:0, npu:1, npu:2, npu:3, stage 0) have taken 50% more" in note
    assert "of its 1500 ms, it waits 500 ms for samples that it reads itself" in note
    single = [RankPace(1.0, 0.0, 0.0), RankPace(2.0, 0.0, 0.0)]
    notes.after(compare(layout(2, 1), single))
    (note,) = notes.after(compare(layout(2, 1), single))
    assert "there is only one replica, so this stage may have more work, and `mm-plan lists` finds more even" in note


def test_the_meter_splits_a_step(one_rank: Any) -> None:
    """On the real clock, in a group of one: every sleep counts where it belongs, from the second step on."""
    from mm.training.pace import PaceMeter

    journal, meter = Journal(), PaceMeter(one_rank, Device.pick("cpu"))
    journal.listeners.append(meter)
    for own_data_seconds in (0.0, 0.0, 0.01, 9.9, 0.0):
        with journal.during(Work.DATA):
            time.sleep(0.02)
        with journal.during(Work.FORWARD), journal.during(Work.EXCHANGE):
            time.sleep(0.03)
        with journal.during(Work.UPDATE):
            time.sleep(0.05)
            with journal.during(Work.UPDATE_WAIT), journal.during(Work.REDUCTION):
                time.sleep(0.01)
        meter.end_step(own_data_seconds)
        with meter.paused(), journal.during(Work.DATA):
            time.sleep(0.1)
    (pace,), num_steps = meter.gather()
    assert num_steps == 3  # neither the first step nor the last, which is read a step later
    assert 0.05 <= pace.work_seconds < 0.15  # with the pauses it would be more
    assert (0.0 + 0.01 + 0.02) / 3 <= pace.data_seconds < 0.05  # 9.9 s are more than the step has waited
    assert pace.data_seconds + pace.wait_seconds >= 0.06
    assert meter.gather() == ((), 0)


class LateDevice:
    """Like an accelerator: it has passed a mark only once the host has read a number that was queued after it."""

    torch_device = "late:0"

    def __init__(self) -> None:
        self.num_marks = self.num_passed = 0

    def mark(self) -> int:
        self.num_marks += 1
        return self.num_marks

    def max_memory_bytes(self) -> int:
        return 2**30

    def seconds_between(self, marks: list[int]) -> list[float]:
        assert max(marks) <= self.num_passed, "a real device would raise, or the host would have to wait"
        return [after - before for before, after in pairwise(marks)]


def test_the_meter_reads_only_what_the_device_has_passed(one_rank: Any) -> None:
    from mm.training.pace import PaceMeter

    journal, device = Journal(), LateDevice()
    meter: Any = PaceMeter(one_rank, device)  # pyright: ignore[reportArgumentType]
    journal.listeners.append(meter)
    for _ in range(5):
        with journal.during(Work.DATA), meter.paused():
            pass
        with journal.during(Work.UPDATE), journal.during(Work.UPDATE_WAIT):
            pass
        device.num_passed = device.num_marks  # the host reads the norm
        with journal.during(Work.UPDATE_WAIT):  # queued after it
            pass
        meter.end_step(0.0)
        with meter.paused():
            pass
    (pace,), num_steps = meter.gather()
    assert num_steps == 3 and (pace.work_seconds, pace.data_seconds, pace.wait_seconds) == (5.0, 0.0, 3.0)
