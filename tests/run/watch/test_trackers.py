"""Metrics reach the experiment trackers, without a network; a missing package is reported before a run begins."""

import importlib
import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mm.config.args import parse
from mm.errors import UserError
from mm.run.watch.metrics import MetricsWriter, ScoreMetrics, ValidationMetrics, score_line
from mm.run.watch.trackers import tracker_problems
from tests.run.watch.test_metrics import BASE, STEP

VALIDATION = ValidationMetrics(
    iteration=5, consumed_samples=960, validation_loss=1.5, num_samples=13, num_target_tokens=98,
    validation_seconds=0.25, best_validation_loss=1.25, best_iteration=3)
SCORE = ScoreMetrics(
    iteration=5, consumed_samples=960, validation_score_percent=62.5, num_questions=8, num_truncated_answers=1,
    answer_seconds=0.25)


def write_a_run(tmp_path: Path, *flags: str) -> None:
    """Two steps, then a validation and a score of answers."""
    writer = MetricsWriter(parse([*BASE, "--log-dir", str(tmp_path / "logs"), *flags]), {"a": {"b": 1}, "c": [2]}, 0)
    for iteration in (4, 5):
        writer.write(replace(STEP, iteration=iteration))
    writer.write_validation(VALIDATION)
    writer.write_score(SCORE, "DocVQA")
    writer.close()


def test_tensorboard_has_the_curves(tmp_path: Path) -> None:
    write_a_run(tmp_path, "--tensorboard-dir", str(tmp_path / "board"))
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(
        str(tmp_path / "board")).Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(4, 1.25), (5, 1.25)]
    assert [(one.step, one.value) for one in events.Scalars("validation_loss")] == [(5, 1.5)]
    assert [(one.step, one.value) for one in events.Scalars("validation_score_percent")] == [(5, 62.5)]
    assert "mfu" not in events.Tags()["scalars"]  # unknown on this device


def test_the_line_of_a_score() -> None:
    assert score_line(SCORE, "DocVQA") == (" validation score at iteration 5 | DocVQA: 62.50% | questions: 8 | "
                                           "truncated answers: 1 | elapsed time (ms): 250.0 |")


def parts_of(raw: bytes) -> Iterator[bytes]:
    """The files of wandb and swanlab are logs in LevelDB's documented format, after 7 bytes."""
    place, begun = 7, b""
    while place + 7 <= len(raw):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, place)
        begun += raw[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            yield begun
            begun = b""


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_a_run(tmp_path, "--wandb-project", "project", "--wandb-exp-name", "run")
    importlib.import_module("wandb").teardown()  # the end of a run does not wait for its file
    (file,) = (tmp_path / "logs" / "wandb").glob("offline-run-*/run-*.wandb")
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rows, began = [], None
    for data in parts_of(file.read_bytes()):
        record = records.Record.FromString(data)
        began = record.run if record.HasField("run") else began
        if record.HasField("history"):
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
    assert began is not None and (began.project, began.display_name) == ("project", "run")
    assert [(row["_step"], row["loss"], row.get("validation_loss"), row.get("validation_score_percent"))
            for row in rows] == [(4, 1.25, None, None), (5, 1.25, 1.5, 62.5)]


def test_wandb_without_a_login_suggests_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    importlib.import_module("wandb").teardown()  # clears its cached environment
    with pytest.raises(UserError, match=r"--wandb-project: Weights & Biases cannot start .*WANDB_MODE=offline"):
        write_a_run(tmp_path, "--wandb-project", "project")


def test_swanlab_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    write_a_run(tmp_path, "--swanlab-project", "project", "--swanlab-exp-name", "run")
    (file,) = (tmp_path / "logs" / "swanlog").glob("run-*/run-*.swanlab")
    records = importlib.import_module("swanlab.proto.swanlab.record.v1.record_pb2")
    found: dict[str, list[tuple[int, float]]] = {}
    for record in map(records.Record.FromString, parts_of(file.read_bytes())):
        if record.HasField("scalar"):
            found.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
    assert found["loss"] == [(4, 1.25), (5, 1.25)]
    assert found["validation_loss"] == [(5, 1.5)] and found["validation_score_percent"] == [(5, 62.5)]


def test_a_missing_package_is_reported_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds only wandb's folder of run files beside the program, not the package."""
    flags = {"tensorboard": "--tensorboard-dir", "wandb": "--wandb-project", "swanlab": "--swanlab-project"}
    args = parse([*BASE, *(word for flag in flags.values() for word in (flag, "x"))])
    for package in flags:
        (tmp_path / package).mkdir()
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert list(tracker_problems(args)) == [
        f"{flag} needs the package {package}, which is not installed; install it with pip install {package}, or leave "
        f"the flag out" for package, flag in flags.items()]
    assert list(tracker_problems(parse(BASE))) == []
