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
from mm.timeline.picture import measured_steps, read_trace, trace, write_timeline
from mm.timeline.spans import Moment, RankRecord
from tests.timeline.records import record, records, timeline

COUNTS = (BatchTotals(300, 480, 3, 0, 120, 2, 1, 30_000, 90_000, 20_000),) * 2


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
