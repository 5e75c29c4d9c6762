"""``mm-plan compare`` and predicted timelines: one real run on two stages, measured by ``--profile-pipeline``."""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mm.config.run import load_run
from mm.cost.by_device import calibration_by_flops
from mm.cost.calibration import BlockLaws, Law
from mm.cost.costs import Cutting
from mm.cost.predict import Predictor
from mm.cost.workload import COUNTS, Workload
from mm.parallel.activity import Activity, Work
from mm.plan.reports import predicted_timeline, step_parts
from mm.timeline import COMPUTING, ActivitySpan, RankRecord, StepTimeline, extent, seconds_of
from tests.cost.test_costs import by_flops
from tests.cost.test_predict import run_of
from tests.plan.test_cli import said
from tests.test_timeline import SETTINGS
from tests.tiny import our_config
from tests.tiny_inputs import flags_of, run, write_inputs

SVG = "{http://www.w3.org/2000/svg}"
STEP = "pipeline_step_4.json"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A measured run, and the calibration of a device that does 10^11 FLOPs a second."""
    folder = write_inputs(tmp_path_factory.mktemp("compare"))
    run(folder, "a run", 2, "--profile-pipeline", "4", "--exit-interval", "4")
    settings = load_run([*flags(folder), "--dry-run"], environment={})
    found = calibration_by_flops(settings.model, Cutting(1, sequence_parallel=False), "fp32")
    blocks = tuple(replace(one, laws=BlockLaws(one.laws.forward * 1e-11, one.laws.backward * 1e-11))
                   for one in found.blocks)
    replace(found, machine=replace(found.machine, device="cpu"), blocks=blocks,
            step=Law(1e-4, 1e-9), message=Law(1e-5, 1e-9)).write(folder / "found.json")
    return folder


def flags(folder: Path, *more: str) -> list[str]:
    return [*flags_of(folder, "a run", 2, "--world-size", "2"), *more]


def compared(capsys: pytest.CaptureFixture, folder: Path, status: int, logs: Path, *more: str | Path) -> str:
    return said(capsys, status, "compare", logs, "--calibration", folder / "found.json", *more, "--", *flags(folder))


def events_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def boxes(path: Path) -> list[Counter[str]]:
    """How often each pass occurs in each timeline of a picture."""
    picture = ElementTree.parse(path).getroot()
    return [Counter(title.text.partition(":")[0] for title in panel.iter(f"{SVG}title")
                    if "ward" in (title.text or "")) for panel in picture.iter(f"{SVG}g")]


def test_a_measured_step_has_its_settings_and_microbatches(inputs: Path) -> None:
    facts = json.loads((inputs / "a run/logs" / STEP).read_text())["otherData"]
    assert facts["settings"]["world_size"] == 2 and facts["settings"]["precision"] == "fp32"
    assert [rank["holds"] for rank in facts["records"]] == ["5 ViT, 0 LLM layers", "3 ViT, 4 LLM layers"]
    rows = [json.loads(line) for line in (inputs / "a run/logs/metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["iteration"] == 4]
    batch = facts["records"][0]["microbatches"]
    for name in ("num_tokens", "num_patches", "num_images", "num_target_tokens"):
        assert sum(one[name] for one in batch) == row[name], name


def test_a_run_is_compared_with_its_prediction(inputs: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    text = compared(capsys, inputs, 0, inputs / "a run/logs", "--timeline", tmp_path / "both")
    seconds = re.search(r"measured ([\d.]+) s, predicted ([\d.]+) s", text)
    assert re.search(r"^Measured  iteration 4$", text, re.MULTILINE)
    of_parts = [re.search(rf"^{part} +([\d.]+) +([\d.]+)$", text, re.MULTILINE)
                for part in ("data", "pipeline", "reduction", "update")]
    for side, total in ((2, 1), (1, 2)):
        assert sum(float(one[side]) for one in of_parts) == pytest.approx(float(seconds[total]), rel=0.01)
    stated = float(re.search(r"differs from the measured step by ([-+][\d.]+)%", text)[1])
    assert stated == pytest.approx(100 * (float(seconds[2]) / float(seconds[1]) - 1), abs=0.2)  # four digits of each
    assert f"wrote {tmp_path}/both/compared_step_4, .json and .svg" in text
    predicted, found = boxes(tmp_path / "both/compared_step_4.svg")
    assert {"LLM forward 0", "LLM forward 1"} <= set(predicted) & set(found)
    processes = {event["pid"] for event in events_of(tmp_path / "both/compared_step_4.json")}
    assert processes == {0, 1, 2, 3}


def test_a_run_that_was_not_measured_is_refused(inputs: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    text = compared(capsys, inputs, 2, tmp_path)
    assert text.startswith(f"error: {tmp_path}: no pipeline_step_*.json; expected the --log-dir of a run with "
                           f"--profile-pipeline ITERATION; add that flag to a run")
    assert "no pipeline_step_*.json" in compared(capsys, inputs, 2, tmp_path / "none")


def test_a_step_of_another_run_is_refused(inputs: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    other = json.loads((inputs / "a run/logs" / STEP).read_text())
    other["otherData"]["settings"].update(tp_size=2, kept_copy="remainder")
    other["otherData"]["settings"]["model"]["vision"]["pipeline_num_layers"] = [[4, 4]]
    (tmp_path / STEP).write_text(json.dumps(other))
    text = compared(capsys, inputs, 2, tmp_path)
    for message in ("tp_size = 2, but the flags and the model JSON say 1; give those of the measured run",
                    "kept_copy = 'remainder', but", "pipeline_num_layers = [(4, 4)], but"):
        assert f"{tmp_path / STEP}: was measured with " in text and message in text


def test_other_mistakes_are_refused(inputs: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    logs, full = inputs / "a run/logs", tmp_path / "a file"
    full.write_text("")
    text = compared(capsys, inputs, 2, logs, "--timeline", full / "x")
    assert text.startswith("error: --timeline: ") and "cannot be written" in text
    text = said(capsys, 2, "compare", logs, "--calibration", tmp_path / "none", "--", *flags(inputs))
    assert "none: cannot be read" in text


def drawn() -> tuple[Predictor, tuple[np.ndarray, ...], StepTimeline]:
    """Two replicas of two stages with two chunks, each with equal microbatches."""
    model, rng = our_config(((2, 1), (1, 0)), ((0, 0), (1, 3))), np.random.default_rng(0)
    found = by_flops(model)
    blocks = tuple(replace(one, laws=BlockLaws(one.laws.forward * 1e-9 + Law(0, 1e-6), one.laws.backward * 1e-9))
                   for one in found.blocks)
    calibration = replace(found, blocks=blocks, step=Law(1e-3, 1e-8), message=Law(5e-5, 1e-9),
                          all_reduce={2: Law(1e-4, 1e-9)})
    counts = np.zeros((2, 6, len(COUNTS)))
    for name in ("num_tokens", "num_target_tokens", "num_causal_pairs", "num_images", "num_patches", "num_image_pairs",
                 "num_window_pairs"):
        counts[..., COUNTS.index(name)] = rng.integers(100, 400, (2, 1))
    predictor = Predictor(run_of(model, 4), calibration)
    return predictor, tuple(counts), predicted_timeline(predictor, counts, 3)


def test_every_stage_of_every_replica_has_a_record() -> None:
    _, _, found = drawn()
    assert [(one.rank, one.pp_rank, one.dp_rank) for one in found.records] == [(0, 0, 0), (1, 0, 1), (2, 1, 0),
                                                                               (3, 1, 1)]
    assert [one.holds for one in found.rows] == ["3 ViT, 1 LLM layers", "1 ViT, 3 LLM layers"]
    assert (found.name, found.iteration) == ("predicted_step_3", 3)
    for record in found.records:
        assert all(one.start <= one.end <= other.start + 1e-12 for one, other in pairwise(record.spans))
        passes = {(span.activity.work is Work.BACKWARD, span.activity.chunk, span.activity.microbatch)
                  for span in record.spans if span.activity.work in COMPUTING}
        assert {(direction, 1, number) for direction in (False, True) for number in range(6)} <= passes


def test_its_seconds_are_those_of_the_prediction() -> None:
    predictor, counts, found = drawn()
    expected, parts = predictor.predict(Workload((counts,))), step_parts(found)
    assert extent(found.records) == pytest.approx((0.0, expected.seconds)) and parts["data"] == 0
    assert sum(parts.values()) == pytest.approx(expected.seconds)
    assert [parts[name] for name in ("pipeline", "update", "reduction")] == pytest.approx(
        [expected.pipeline, expected.update, expected.reduction])
    for record in found.records:
        assert seconds_of(record.spans, {Work.UPDATE}) == pytest.approx(expected.update)


def test_the_parts_of_a_step_by_hand() -> None:
    """Two tensor-parallel ranks of one stage: the second is slower."""
    def rank(number: int, later: float) -> RankRecord:
        times = [(Work.DATA, None, 0.0, 1.0), (Work.INPUTS, 0, 2.0, 2.5), (Work.LANGUAGE_FORWARD, 0, 3.0, 5.0 + later),
                 (Work.EXCHANGE, None, 5.0 + later, 6.0), (Work.BACKWARD, 0, 6.0, 9.0), (Work.REDUCTION, None, 9.5, 10),
                 (Work.UPDATE_WAIT, None, 11.0, 11.5), (Work.UPDATE, None, 11.5, 13.0)]
        spans = tuple(ActivitySpan(Activity(work, None if at is None else 0, at), start, end)
                      for work, at, start, end in times)
        return RankRecord(number, 0, 0, number, "", (), spans)

    found = step_parts(StepTimeline(1, (rank(0, 0.0), rank(1, 0.4)), SETTINGS))
    assert found == pytest.approx({"data": 1.0, "pipeline": 7.0, "reduction": 2.0, "update": 3.0})
