"""Which rank is called slow, and when; in real processes: tests/training/test_packing.py."""

import time
from itertools import pairwise, product
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.device.device import Device
from mm.parallel.activity import Journal, Work
from mm.training.slow_ranks import Pace, RankPlace, SlowRankNotes, compare, median_of_others, slowest_line


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
    own = [of_stage[place.stage] * factor for place, factor in zip(places, noise, strict=True)]
    slow = data.draw(st.sampled_from(places))
    own[slow.rank] = 1.5 * of_stage[slow.stage]
    first, *others = compare(places, own)
    assert (first.stage, first.replica) == (slow.stage, slow.replica) and slow.rank in first.ranks
    assert first.share > 0.3 and all(one.share < 0.11 for one in others)
    assert sorted(rank for one in (first, *others) for rank in one.ranks) == [place.rank for place in places]


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5, 4.0, 9.0]), min_size=2, max_size=9), st.data())
def test_the_median_leaves_the_rank_itself_out(values: list[float], data: st.DataObject) -> None:
    one = data.draw(st.integers(0, len(values) - 1))
    expected = median(values[:one] + values[one + 1 :])
    assert median_of_others(sorted(values), values[one]) == expected


def test_a_single_replica_is_compared_by_stage_and_a_single_group_not_at_all() -> None:
    found = compare(layout(3, 1), [1.0, 1.5, 1.0])
    assert (found[0].ranks, found[0].compared_with) == ((1,), "stages") and found[0].share == pytest.approx(0.5)
    assert compare(layout(1, 1, 4), [float(rank) for rank in range(4)]) == ()


def test_the_line_names_rank_host_device_and_stage() -> None:
    found = compare(layout(2, 4), [0.8128 if rank == 5 else 0.64 for rank in range(8)])
    assert slowest_line(found, 1).startswith(
        " slowest ranks over the last 1 step: rank 5 (host n0, npu:5, stage 1): 813 ms, +27% against the median of the "
        "other replicas; ")
    assert slowest_line(found, 10).count("; ") == 2
    (first, *_) = compare(layout(1, 4, 4), [1.5 if rank == 8 else 1.0 for rank in range(16)])
    assert first.name == "ranks 8 to 11 (host n1, npu:0, npu:1, npu:2, npu:3, stage 0)"


def notes_of(slow_rank: int | None, log_interval: int, step_seconds: float, seed: int) -> list[tuple[int, str]]:
    """The notes of 3,000 steps of two stages and four replicas, each with its step; every own time varies by 30%, and
    each rank stalls for a minute once."""
    drawn, places = np.random.default_rng(seed), layout(2, 4)
    own = step_seconds * drawn.lognormal(0.0, 0.3, (3000, 8)) * ([1.0] * 4 + [2.0] * 4)
    own[drawn.integers(0, 3000, 8), range(8)] += 60.0
    if slow_rank is not None:
        own[1000:, slow_rank] *= 1.5
    notes, found = SlowRankNotes(places, 0.2), list[tuple[int, str]]()
    for last in range(log_interval, 3001, log_interval):
        steps = own[last - log_interval : last]
        pace = Pace(tuple(steps.mean(axis=0)), log_interval, float(steps.max(axis=1).sum()))
        found += [(last, note) for note in notes.after(pace)]
    return found


@pytest.mark.parametrize("log_interval", [1, 10, 100])
@pytest.mark.parametrize("step_seconds", [0.05, 2.0])
def test_noise_and_stalls_are_not_noted_and_a_slow_rank_is_once(log_interval: int, step_seconds: float) -> None:
    for seed in range(3):
        assert notes_of(None, log_interval, step_seconds, seed) == []
        ((step, note),) = notes_of(5, log_interval, step_seconds, seed)
        assert note.startswith("note: rank 5 (host n0, npu:5, stage 1) has taken ")
        assert "more time a step than the median of the other replicas, for at least 50 steps and 120 s" in note
        assert step >= 1040, "the first of the five spans may have begun before the rank was slow"


def test_a_group_is_noted_as_one_and_uneven_stages_are_not() -> None:
    for num_replicas, num_notes in ((4, 1), (1, 0)):
        places = layout(2, num_replicas, 4)
        own = tuple(1.5 if place.rank >= 4 * (2 * num_replicas - 1) else 1.0 for place in places)
        notes = SlowRankNotes(places, 0.2)
        found = [notes.after(Pace(own, 5, 12.0)) for _ in range(300)]
        assert [len(some) for some in found] == [num_notes * (number == 9) for number in range(300)]  # 50 steps, 120 s
        assert all(note.startswith("note: ranks 28 to 31 (host n3,") for some in found for note in some)


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
    pace = meter.gather()
    assert pace is not None and pace.num_steps == 3  # not the first step, nor the last, which is read a step later
    (own,) = pace.own_seconds
    assert 0.05 + (0.0 + 0.01 + 0.02) / 3 <= own < 0.15  # 9.9 s are more than the step has waited
    assert max(0.11, own + 0.04) <= pace.seconds / 3 < 0.2  # with the pauses it would be more
    assert meter.gather() is None


class LateDevice:
    """Like an accelerator: it has passed a mark only once the host has read a number that was queued after it."""

    torch_device = "late:0"

    def __init__(self) -> None:
        self.num_marks = self.num_passed = 0
        self.runtime = self

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
    assert meter.gather() == Pace((5.0,), 3, 24.0)
