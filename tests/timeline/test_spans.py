"""Conversion of moments to spans, and shares of a step."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.parallel.activity import Activity, Work
from mm.timeline.spans import (
    TIMED,
    ActivitySpan,
    Moment,
    RankRecord,
    aligned,
    clock_offset,
    extent,
    flat_spans,
    seconds_of,
    shares,
)
from tests.timeline.records import record, records, steps


def test_the_innermost_activity_counts() -> None:
    forward, vision, language = (Activity(work, 0, 3) for work in (
        Work.FORWARD, Work.VISION_FORWARD, Work.LANGUAGE_FORWARD))
    update = Activity(Work.UPDATE)
    moments = [Moment(0, forward), Moment(1, vision), Moment(4, None), Moment(5, language), Moment(7, None),
               Moment(8, language), Moment(9, None), Moment(10, None), Moment(12, update), Moment(15, None)]
    assert flat_spans(moments) == (
        ActivitySpan(forward, 0, 1), ActivitySpan(vision, 1, 4), ActivitySpan(forward, 4, 5),
        ActivitySpan(language, 5, 9), ActivitySpan(forward, 9, 10), ActivitySpan(update, 12, 15))


@pytest.mark.parametrize(("outer", "inner"), [
    (Work.BACKWARD, Work.REDUCTION), (Work.BACKWARD, Work.GATHER), (Work.VISION_FORWARD, Work.GATHER),
    (Work.LANGUAGE_FORWARD, Work.GATHER), (Work.FORWARD, Work.GATHER)])
def test_a_layers_pass_between_two_collectives_is_not_lost(outer: Work, inner: Work) -> None:
    around, collective = (Activity(work, 0, 3) for work in (outer, inner))
    moments = [Moment(0, around), Moment(4, collective), Moment(5, None), Moment(9, collective), Moment(10, None),
               Moment(12, None)]
    assert [(one.activity.work, one.seconds) for one in flat_spans(moments)] == [
        (outer, 4), (inner, 1), (outer, 4), (inner, 1), (outer, 2)]


@given(steps())
def test_spans_do_not_overlap_and_fill_the_time_of_all_activities(moments: list[Moment]) -> None:
    spans = flat_spans(moments)
    assert all(one.start <= one.end <= other.start for one, other in pairwise(spans))
    depth, outside = 0, 0.0
    for now, then in pairwise(moments):
        depth += -1 if now.begins is None else 1
        outside += then.seconds - now.seconds if depth == 0 else 0.0
    whole = moments[-1].seconds - moments[0].seconds if moments else 0.0
    assert seconds_of(spans, TIMED) == pytest.approx(whole - outside)


@settings(max_examples=20)
@given(records)
def test_shares_sum_to_the_step(found: list[RankRecord]) -> None:
    start, end = extent(found)
    for one in found:
        part = shares(one, found)
        assert min(part.busy, part.waits, part.update, part.idle) >= 0 and (part.bubble >= -1e-9 or end == start)
        assert (part.busy + part.waits + part.update + part.idle) * (end - start) == pytest.approx(end - start)


def test_shares_of_two_stages() -> None:
    """A pipeline of one microbatch is half bubble."""
    forward, backward = Activity(Work.LANGUAGE_FORWARD, 0, 0), Activity(Work.BACKWARD, 0, 0)
    first = record(0, [Moment(0, forward), Moment(1, None), Moment(3, backward), Moment(4, None),
                       Moment(4, Activity(Work.UPDATE)), Moment(5, None)])
    second = record(1, [Moment(0, Activity(Work.EXCHANGE)), Moment(1, None), Moment(1, forward), Moment(2, None),
                        Moment(2, backward), Moment(3, None), Moment(4.5, Activity(Work.UPDATE)), Moment(5, None)])
    found = [shares(one, [first, second]) for one in (first, second)]
    assert [(one.busy, one.waits, one.update, one.idle, one.bubble) for one in found] == [
        pytest.approx((0.4, 0.0, 0.2, 0.4, 0.5)), pytest.approx((0.4, 0.2, 0.1, 0.3, 0.5))]


@given(st.lists(st.tuples(*[st.floats(0, 1e-2)] * 5), min_size=1, max_size=9), st.floats(-1e4, 1e4))
def test_fast_barriers_give_a_precise_clock_offset(barriers: list[tuple[float, ...]], ahead: float) -> None:
    meetings, reference, now, slack = [], [], 0.0, []
    for came, other_came, pause, left, other_left in barriers:
        passed = now + max(came, other_came)
        meetings.append((now + came + ahead, passed + left + ahead))
        reference.append((now + other_came, passed + other_left))
        slack.append(max(passed + left - now - came, passed + other_left - now - other_came))
        now = passed + left + other_left + pause
    found = clock_offset(tuple(meetings), tuple(reference))
    assert abs(found - ahead) <= max(slack) * 2 + 1e-9
    assert clock_offset(tuple(reference), tuple(reference)) == 0.0


def test_ranks_of_two_machines_get_one_clock() -> None:
    work = Activity(Work.BACKWARD, 0, 0)
    here = record(0, [Moment(10, work), Moment(11, None)], ((20.0, 20.1), (20.2, 20.3)))
    there = record(1, [Moment(512, work), Moment(513, None)], ((520.0, 520.1), (520.2, 520.3)))
    first, second = aligned([there, here])
    assert [(one.rank, one.spans[0].start) for one in (first, second)] == [(0, 0), (1, pytest.approx(2))]
