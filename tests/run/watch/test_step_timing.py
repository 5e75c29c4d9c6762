"""Which rank is called slow, and when; in real processes: tests/run/test_packing.py."""

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
from mm.run.progress import TrainingProgress
from mm.run.watch.step_timing import RankPlace, SlowRankNotes, StepTiming, compare, median_of_others, slowest_line
from mm.run.watch.watcher import Step


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
    found = compare(layout(1, 4, 4), [1.5 if rank == 8 else 1.0 for rank in range(16)])
    assert "ranks 8 to 11 (host n1, npu:0, npu:1, npu:2, npu:3, stage 0): 1500 ms" in slowest_line(found, 1)


@pytest.mark.parametrize(("num_replicas", "log_interval", "step_seconds"), [
    (4, 1, 0.05), (4, 10, 2.0), (4, 100, 2.0), (1, 10, 2.0)])
def test_noise_and_stalls_are_not_noted_and_a_slow_rank_is_once(num_replicas, log_interval, step_seconds) -> None:
    """Every own time varies by 30%, and each rank stalls for a minute once; with one replica, no stage is noted."""
    drawn, places = np.random.default_rng(0), layout(2, num_replicas)
    own = step_seconds * drawn.lognormal(0.0, 0.3, (3000, len(places))) * [1.0 + one.stage for one in places]
    own[drawn.integers(0, 3000, len(places)), range(len(places))] += 60.0
    for slow_rank in (None, len(places) - 1):
        if slow_rank is not None:
            own[1000:, slow_rank] *= 1.5
        notes, found = SlowRankNotes(places, 0.2), list[tuple[int, str]]()
        for last in range(log_interval, 3001, log_interval):
            steps = own[last - log_interval : last]
            of_ranks = steps.sum(axis=0).tolist()
            found += [(last, note) for note in notes.after(log_interval, float(steps.max(axis=1).sum()), of_ranks)]
        if slow_rank is None or num_replicas == 1:
            assert found == []
            continue
        ((step, note),) = found
        assert note.startswith("note: rank 7 (host n0, npu:7, stage 1): ") and "at least 50 steps and 120 s" in note
        assert step >= 1040, "the first of the five spans may have begun before the rank was slow"


def ended(iteration: int, own_data_seconds: float) -> Step:
    return Step(TrainingProgress(iteration, 0), None, None, 0.0, 0.0, own_data_seconds)  # type: ignore[arg-type]


def test_a_step_is_split(one_rank: Any) -> None:
    """On the real clock, in a group of one: every sleep counts where it belongs, from the second step on."""
    journal, timing = Journal(), StepTiming(one_rank, Device.pick("cpu"), 100, 0.2)
    journal.listeners.append(timing)
    for number, own_data_seconds in enumerate((0.0, 0.0, 0.01, 9.9, 0.0), 1):
        with journal.during(Work.DATA):
            time.sleep(0.02)
        with journal.during(Work.FORWARD), journal.during(Work.EXCHANGE):
            time.sleep(0.03)
        with journal.during(Work.UPDATE):
            time.sleep(0.05)
            with journal.during(Work.UPDATE_WAIT), journal.during(Work.REDUCTION):
                time.sleep(0.01)
        with timing.paused():
            timing.after(ended(number, own_data_seconds))
            with journal.during(Work.DATA):
                time.sleep(0.1)
    assert timing._num_steps == 3  # not the first step, nor the last, which is read a step later
    own = timing._own_seconds / 3
    assert 0.05 + (0.0 + 0.01 + 0.02) / 3 <= own < 0.15  # 9.9 s are more than the step has waited
    assert own + 0.04 <= timing._seconds / 3 < 0.2  # with the pauses it would be more


class LateDevice:
    """Like an accelerator: it has passed an event only once the host has read a number that was queued after it."""

    torch_device = "late:0"

    def __init__(self) -> None:
        self.num_marks = self.num_passed = 0
        self.runtime = self

    def record_event(self) -> int:
        self.num_marks += 1
        return self.num_marks

    def max_memory_bytes(self) -> int:
        return 2**30

    def seconds_between(self, events: list[int]) -> list[float]:
        assert max(events) <= self.num_passed, "a real device would raise, or the host would have to wait"
        return [after - before for before, after in pairwise(events)]


def test_only_what_the_device_has_passed_is_read(one_rank: Any) -> None:
    journal, device = Journal(), LateDevice()
    timing: Any = StepTiming(one_rank, device, 5, 0.2)  # pyright: ignore[reportArgumentType]
    journal.listeners.append(timing)
    for number in range(1, 6):
        with journal.during(Work.DATA), timing.paused():
            pass
        with journal.during(Work.UPDATE), journal.during(Work.UPDATE_WAIT):
            pass
        device.num_passed = device.num_marks  # the host reads the norm
        with journal.during(Work.UPDATE_WAIT):  # queued after it
            pass
        with timing.paused():
            timing.after(step := ended(number, 0.0))
    assert step.measured == {"stage_memory_bytes": (2**30,)} and step.lines == []  # one rank has no others
