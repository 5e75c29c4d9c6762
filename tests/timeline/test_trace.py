"""The trace of a step: every span of every rank, in Perfetto's format, and read back."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings

from mm.batch import BatchTotals
from mm.errors import UserError
from mm.parallel.activity import Activity, Work
from mm.timeline.files import measured_steps, write_timeline
from mm.timeline.spans import Moment, RankRecord
from mm.timeline.trace import read_trace, trace
from tests.timeline.records import SETTINGS, record, records, timeline

COUNTS = (BatchTotals(300, 480, 3, 0, 120, 2, 1, 30_000, 90_000, 20_000),) * 2


@settings(max_examples=20)
@given(records)
def test_the_trace_has_every_span_of_every_rank(found: list[RankRecord]) -> None:
    events = [event for event in trace([timeline(found)])["traceEvents"] if event["ph"] == "X"]
    spans = [(one.rank, span) for one in found for span in one.spans]
    assert [(event["tid"], event["cat"], event["args"]["microbatch"], event["ts"]) for event in events] == [
        (rank, span.activity.work.name.lower(), span.activity.microbatch, span.start * 1e6) for rank, span in spans]
    assert all(event["dur"] == pytest.approx(1e6 * span.seconds) for event, (_, span) in zip(
        events, spans, strict=True))


@settings(max_examples=20)
@given(records)
def test_what_is_written_is_read_back(found: list[RankRecord]) -> None:
    written = timeline([replace(one, microbatches=COUNTS, dp_rank=0) for one in found])
    with TemporaryDirectory() as folder:
        write_timeline(folder, "--log-dir", [written])
        (back,) = measured_steps(Path(folder))
    assert (back.iteration, back.settings, len(back.records)) == (7, SETTINGS, len(written.records))
    for one, other in zip(back.records, written.records, strict=True):
        assert replace(one, spans=()) == replace(other, spans=(), meetings=())
        assert [span.activity for span in one.spans] == [span.activity for span in other.spans]
        for span, expected in zip(one.spans, other.spans, strict=True):
            assert (span.start, span.end) == pytest.approx((expected.start, expected.end), abs=1e-9)


def test_prediction_and_measurement_of_a_stage_follow_one_another() -> None:
    work = Work.LANGUAGE_FORWARD
    found = [record(rank, [Moment(0, Activity(work, 0, 0)), Moment(1, None)]) for rank in (0, 1)]
    both = trace([timeline(found, is_predicted=True), timeline(found)])
    names = {event["pid"]: event["args"]["name"] for event in both["traceEvents"] if event["name"] == "process_name"}
    assert names == {0: "stage 0, replica 0, predicted", 1: "stage 0, replica 0, measured",
                     2: "stage 1, replica 0, predicted", 3: "stage 1, replica 0, measured"}
    boxes = [event for event in both["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in boxes} == set(names) and {event["name"] for event in boxes} == {"LLM forward 0"}


def test_damaged_traces_are_refused(tmp_path: Path) -> None:
    work = Activity(Work.BACKWARD, 0, 0)
    one = replace(record(0, [Moment(0, work), Moment(1, None)]), microbatches=COUNTS)
    write_timeline(tmp_path, "--log-dir", [timeline([one])])
    path = tmp_path / "pipeline_step_7.json"
    whole = json.loads(path.read_text())
    facts, events = whole["otherData"], whole["traceEvents"]
    (*others, last) = events
    for content, message in (
        ("{", "cannot be read (Expecting"), ("[]", "cannot be read (a list, not an object)"),
        (json.dumps({**whole, "otherData": {"iteration": 7}}), "has no settings and microbatches of its step"),
        (json.dumps({**whole, "otherData": {**facts, "iteration": "x"}}), "iteration: Input should be a valid integer"),
        (json.dumps({**whole, "otherData": {**facts, "microbatches": []}}), "is damaged"),
        (json.dumps({**whole, "traceEvents": [*others, {**last, "cat": "tea"}]}), "has 'tea'"),
        (json.dumps({**whole, "traceEvents": 3}), "Input should be a valid tuple"),
        (json.dumps({**whole, "traceEvents": [*others, {**last, "ts": float("nan")}]}), "should be a finite number"),
        (json.dumps({**whole, "traceEvents": [*others, {**last, "args": {"microbatch": 0.5}}]}), "valid integer"),
    ):
        path.write_text(content)
        with pytest.raises(UserError) as caught:
            read_trace(path)
        (problem,) = caught.value.problems
        assert problem.startswith(f"{path}: ") and message in problem
        assert problem.endswith("measure the step again with --profile-pipeline")


def test_a_directory_without_a_measured_step_is_refused(tmp_path: Path) -> None:
    for folder, what in ((tmp_path, "no pipeline_step_*.json"), (tmp_path / "none", "no such directory")):
        with pytest.raises(UserError) as caught:
            measured_steps(folder)
        assert str(caught.value).startswith(f"{folder}: {what}; expected the --log-dir of a run with --profile-pipel")
