"""The timeline of a step: spans and shares from moments, the picture, and the trace that is written and read back."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.batch import BatchTotals
from mm.errors import UserError
from mm.parallel.activity import Activity, Work
from mm.timeline import (
    TIMED,
    ActivitySpan,
    Moment,
    RankRecord,
    StepSettings,
    StepTimeline,
    aligned,
    clock_offset,
    draw,
    extent,
    flat_spans,
    measured_steps,
    read_trace,
    seconds_of,
    shares,
    trace,
    write_timeline,
)
from tests.tiny import our_config

SETTINGS = StepSettings(
    model=our_config(((4, 0),), ((1, 3),)), world_size=2, tp_size=1, cp_size=1, sequence_parallel=False,
    precision="fp32", use_distributed_optimizer=False, grad_reduce_in_bf16=False, overlap_grad_reduce=False,
    overlap_param_gather=False, context_parallel_algo="ulysses_cp_algo")
SVG = "{http://www.w3.org/2000/svg}"
COUNTS = (BatchTotals(300, 480, 3, 0, 120, 2, 1, 30_000, 90_000, 20_000),) * 2


@st.composite
def activities(draw_one, depth: int = 2) -> list:
    """Consecutive activities, each with nested ones."""
    one = st.builds(Activity, st.sampled_from(TIMED), st.integers(0, 1), st.integers(0, 9))
    inner = activities(depth - 1) if depth else st.just([])
    return draw_one(st.lists(st.tuples(one, inner), max_size=3))


@st.composite
def steps(draw_one, min_moments: int = 0) -> list[Moment]:
    """A rank's record of a step."""
    found: list[Activity | None] = []

    def walk(nested: list) -> None:
        for activity, inner in nested:
            found.append(activity)
            walk(inner)
            found.append(None)

    walk(draw_one(activities()))
    gaps = draw_one(st.lists(st.floats(1e-6, 1.0), min_size=len(found), max_size=len(found)))
    times = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    return [Moment(when, activity) for when, activity in zip(times, found, strict=True)]


def record(rank: int, moments: list[Moment], meetings: tuple = (), stage: int | None = None) -> RankRecord:
    stage = rank if stage is None else stage
    return RankRecord(rank, stage, 0, 0, "1 ViT, 1 LLM layers", meetings, flat_spans(moments))


records = st.lists(steps(), min_size=1, max_size=3).map(
    lambda found: [record(rank, moments) for rank, moments in enumerate(found)])


def timeline(found: list[RankRecord], iteration: int = 7, is_predicted: bool = False) -> StepTimeline:
    """One step of these ranks, on a clock that they share already."""
    return StepTimeline(iteration, tuple(found), SETTINGS, is_predicted)


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


@settings(max_examples=20)
@given(records)
def test_the_picture_is_well_formed_and_has_a_box_for_every_span(found: list[RankRecord]) -> None:
    """Boxes have a title.  Those below a fifth of a pixel are omitted."""
    picture = ElementTree.fromstring(draw([timeline(found)], "a.json"))
    boxes = [one for one in picture.iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    start, end = extent(found)
    widths = [760 * span.seconds / max(end - start, 1e-9) for one in found for span in one.spans]
    assert [float(box.attrib["width"]) for box in boxes] == [
        pytest.approx(width, abs=0.01) for width in widths if width >= 0.2]
    for box in boxes:
        assert 159.99 <= float(box.attrib["x"]) <= 920.01 - float(box.attrib["width"])
    assert next(iter(picture)).attrib["fill"] == "#ffffff"  # for viewers with a dark background


def test_boxes_are_labelled() -> None:
    """A backward pass has the colour of its forward pass; only the first rank of a stage is drawn."""
    vision, language, backward = Work.VISION_FORWARD, Work.LANGUAGE_FORWARD, Work.BACKWARD
    moments = [one for index, (work, microbatch) in enumerate([
        (language, 0), (vision, 0), (language, 1), (backward, 0), (backward, 1)])
        for one in (Moment(index, Activity(work, 1, microbatch)), Moment(index + 1, None))]
    picture = ElementTree.fromstring(draw([timeline([record(0, moments), record(1, moments, stage=0)])], "a.json"))
    titles = [one.text for one in picture.iter(f"{SVG}title")]
    assert [title.partition(":")[0] for title in titles] == [
        "LLM forward 0b", "ViT forward 0b", "LLM forward 1b", "ViT and LLM backward 0b", "LLM backward 1b"]
    assert titles[1].endswith(": 1,000.00 to 2,000.00 ms")
    texts = [one.text or "" for one in picture.iter(f"{SVG}text")]
    assert {"stage 0 (rank 0)", "0b", "100.0%", "4,500", "time (ms)", "bubble"} <= set(texts)
    assert "Microbatches: 2, stages: 1, each of 2 chunks, time: 5,000.0 ms." in " ".join(texts)


def test_a_prediction_stands_above_the_measured_step_on_one_scale() -> None:
    forward, update = Activity(Work.LANGUAGE_FORWARD, 0, 0), Activity(Work.UPDATE)
    short = record(0, [Moment(0, forward), Moment(1, None), Moment(1, update), Moment(2, None)])
    long = record(0, [Moment(0, forward), Moment(3, None), Moment(3, update), Moment(4, None)])
    text = draw([timeline([short], is_predicted=True), timeline([long])], "a.json", ["one note", "and <another>"])
    picture = ElementTree.fromstring(text)
    panels = list(picture.iter(f"{SVG}g"))
    widths = [[float(box.attrib["width"]) for box in panel.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
              for panel in panels]
    assert widths == [[190.0, 190.0], [570.0, 190.0]]
    headings = [one.text for panel in panels for one in panel.iter(f"{SVG}text") if one.attrib["font-size"] == "18"]
    assert headings == ["Predicted step: iteration 7", "Measured step: iteration 7"]
    texts = [one.text for one in picture.iter(f"{SVG}text")]
    assert "one note" in texts and "and <another>" in texts
    bottom = float(picture.attrib["height"])
    assert all(float(one.attrib["y"]) < bottom for one in picture.iter(f"{SVG}text"))
    assert texts.count("LLM forward") == 1  # one legend for both


@settings(max_examples=20)
@given(records)
def test_every_span_of_every_rank_is_written_and_read_back(found: list[RankRecord]) -> None:
    written = timeline([replace(one, microbatches=COUNTS, dp_rank=0) for one in found])
    events = [event for event in trace([written])["traceEvents"] if event["ph"] == "X"]
    spans = [(one.rank, span) for one in found for span in one.spans]
    assert [(event["tid"], event["cat"], event["args"]["microbatch"], event["ts"]) for event in events] == [
        (rank, span.activity.work.name.lower(), span.activity.microbatch, span.start * 1e6) for rank, span in spans]
    assert all(event["dur"] == pytest.approx(1e6 * span.seconds) for event, (_, span) in zip(
        events, spans, strict=True))
    with TemporaryDirectory() as folder:
        write_timeline(folder, "--log-dir", [written])
        assert measured_steps(Path(folder)) == [written]


def test_prediction_and_measurement_of_a_stage_follow_one_another() -> None:
    work = Work.LANGUAGE_FORWARD
    found = [record(rank, [Moment(0, Activity(work, 0, 0)), Moment(1, None)]) for rank in (0, 1)]
    both = trace([timeline(found, is_predicted=True), timeline(found)])
    names = {event["pid"]: event["args"]["name"] for event in both["traceEvents"] if event["name"] == "process_name"}
    assert names == {0: "stage 0, replica 0, predicted", 1: "stage 0, replica 0, measured",
                     2: "stage 1, replica 0, predicted", 3: "stage 1, replica 0, measured"}
    boxes = [event for event in both["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in boxes} == set(names) and {event["name"] for event in boxes} == {"LLM forward 0"}


def test_damaged_and_missing_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no pipeline_step_\*\.json; expected the --log-dir of a run with"):
        measured_steps(tmp_path)
    path = tmp_path / "pipeline_step_7.json"
    for content in ("{", "[]", "{}", json.dumps({"otherData": {"iteration": 7}})):
        path.write_text(content)
        with pytest.raises(UserError, match=r"(?s)pipeline_step_7\.json: cannot be read \(.*measure the step again"):
            read_trace(path)
