"""The page of a run says what its files say, for any run: long, short, damaged or hostile."""

import base64
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.errors import UserError
from mm.page import MAX_BINS, binned, main, run_page
from mm.run.watch.metrics import SpikeMetrics, ValidationMetrics
from tests.browser import WIDTHS, content_width, needs_browser
from tests.page_reader import PageReader
from tests.run.watch.test_metrics import STEP

FACTS: dict[str, Any] = {
    "arguments": {"mm_model": "model.json", "train_iters": 400, "lr": 1e-5, "tensor_model_parallel_size": 2,
                  "context_parallel_size": 1},
    "model": {"vision": {"num_layers": 8}, "language": {"num_layers": 4}}, "world_size": 4,
    "pipeline_model_parallel_size": 2, "data_parallel_size": 1, "precision": "bf16", "global_batch_size": 192,
    "ran_on": {"device": "cpu", "backend": "gloo", "versions": {"torch": "2.13.0"}},
    "optimizer_groups": [{"max_lr": 1e-5, "weights": ["a.weight"] * 1000}], "started_at": "2026-11-28 12:00:00",
    "predicted_peak_bytes": [{"text": 2**30, "visual": 2**31}, {"text": 3 * 2**30, "visual": 2**32}],
}  # fmt: skip
NOW = datetime(2026, 11, 28, 13)


def step_row(iteration: int, **changes: Any) -> dict[str, Any]:
    return {"kind": "step", **asdict(replace(STEP, iteration=iteration)), "num_skipped": 0, **changes}


def write_run(
    folder: Path, num_steps: int = 100, changed: Callable[[int], dict[str, Any]] = lambda _: {}, **facts: Any
) -> Path:
    """A run of so many steps with a validation and a spike; ``changed`` gives other values for a step's fields."""
    folder.mkdir(parents=True)
    rows = [step_row(iteration, **changed(iteration)) for iteration in range(1, num_steps + 1)]
    found = ValidationMetrics(num_steps, 1, 0.75, 10, 100, 2.0, 0.625, 50)
    rows += [{"kind": "validation", **asdict(found)},
             {"kind": "spike", **asdict(SpikeMetrics(num_steps, "the loss is 7", True, 7.0, 1.0, tuple(range(90))))}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps(FACTS | facts))
    return folder


def html_of(folder: Path) -> str:
    return run_page(folder, "r", NOW)


def shown(folder: Path) -> str:
    return PageReader(html_of(folder)).text


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(allow_subnormal=False, width=32)), min_size=1, max_size=900))
def test_bins_lose_no_extreme_value(points: list[tuple[int, float]]) -> None:
    steps, values = np.cumsum([distance for distance, _ in points]), np.array([value for _, value in points])
    bins, finite = binned(steps.astype(np.float64), values).T, values[np.isfinite(values)]
    assert len(bins) <= MAX_BINS and (len(finite) == 0) == (len(bins) == 0)
    if len(finite):
        assert (bins[:, 2].min(), bins[:, 3].max()) == (finite.min(), finite.max())
        assert (bins[:, 2] <= bins[:, 3]).all() and (np.diff(bins[:, 0]) > 0).all()
    if len(finite) == len(points) and steps[-1] - steps[0] < MAX_BINS:
        assert (bins[:, 1] == values).all()


def test_the_page_says_what_the_files_say(tmp_path: Path) -> None:
    slow = {"ranks": [3], "stage": 1, "replica": 0, "hosts": ["n1"], "devices": ["npu:3"], "own_seconds": 2.0,
            "median_seconds": 1.0, "compared_with": "replicas", "share": 1.0}
    folder = write_run(tmp_path / "run", 100, lambda step: {
        "slowest_ranks": [slow], "stage_memory_bytes": [2**30, 2**31]} if step % 50 == 0 else {})
    (folder / "quarantine.jsonl").write_text("".join(json.dumps(
        {"dataset": "a.json", "line": number, "index": number, "id": None, "path": None, "reason": "is empty"}) + "\n"
        for number in range(60)) + '{"cut')
    for name in ("pipeline_step_9", "pipeline_step_10", "predicted_step_30"):
        (folder / f"{name}.svg").write_text("<svg/>")
    text = shown(folder)
    for part in ("model.json (8 ViT layers + 4 LLM layers)", "tensor 2 x context 1 x pipeline 2 x data 1 = 4 ranks",
                 "2026-11-28 12:00:00", "100 of 400 (25.0%)", "4 min", "median of the last 100 steps",
                 "unknown: no peak", "0.625, step 50", "Validations (1)", "the loss is 7", "unchanged",
                 "0, 1, 2, 3, 4, 5, 6, 7 ...",
                 "n1 npu:3", "2,000 ms", "+100%, other replicas", "Samples left out (60; the latest 50)", "a.json:59",
                 "no end is recorded", "Timeline of a step (pipeline_step_10.svg)", "arguments.lr 1e-05",
                 "stage predicted, all tokens text predicted, all tokens visual measured 0 1.00 2.00 1.00 1 3.00 4.00"):
        assert part in text, part
    assert "a.weight" not in text and "a.json:9:" not in text
    ended = write_run(tmp_path / "ended", ended={"at": "2026-11-28 14:00:00", "iteration": 100, "how": "all are done"})
    assert "ended at 2026-11-28 14:00:00: all are done" in shown(ended)


def test_a_spike_in_a_long_run_is_on_the_page_and_lost_values_are_counted(tmp_path: Path) -> None:
    html = html_of(write_run(tmp_path / "run", 3000, lambda step: {
        "loss": 5000.0 if step == 1234 else None if step in (7, 2000) else 1.25}))
    notes, band = re.findall(r'<b>Loss</b> <small>(.*?)</small>.*?<path d="(M[^"]*Z)"', html, re.DOTALL)[0]
    assert notes.startswith("(logarithmic; not finite: 2; ")
    tops = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", band)]
    assert min(tops) < 20 and sorted(tops)[len(tops) // 2] > 150  # the spike is near the top, all else at the bottom
    assert len(html) < 400_000


def test_hostile_texts_are_text(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[31m"
    folder = write_run(tmp_path / "run", started_at=bad, arguments=FACTS["arguments"] | {"mm_model": bad, bad: bad})
    answers = folder / "answers" / "iter_0000010"
    answers.mkdir(parents=True)
    (answers / "predictions.jsonl").write_text(json.dumps(
        {"index": bad, "question": bad, "right": [bad], "prediction": bad, "score": 0.0}) + "\n")
    (folder / "pipeline_step_3.svg").write_text("<svg><script>alert(1)</script></svg>")
    html = run_page(folder, bad, NOW)
    assert PageReader(html).text.count("alert(1)") > 10 and "\x1b" not in html and "\u202e" not in html


def test_the_latest_answers_with_their_images(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for iteration in (10, 90):
        (folder / "answers" / f"iter_{iteration:07d}").mkdir(parents=True)
        (folder / "answers" / f"iter_{iteration:07d}" / "predictions.jsonl").write_text("".join(json.dumps({
            "index": str(number), "question": f"Which is it, {number}?", "right": ["7"], "options": {"A": "one"},
            "prediction": f"at {iteration}", "score": float(number == 0)}) + "\n" for number in range(3)))
    (folder / "answers" / "thumbnails").mkdir()
    for name in ("1_0", "1_1"):
        (folder / "answers" / "thumbnails" / f"{name}.jpg").write_bytes(b"JPEG")
    html = html_of(folder)
    text = PageReader(html).text
    assert html.count(base64.b64encode(b"JPEG").decode()) == 2 and "Answers after step 90" in text
    assert re.findall(r"Which is it, (\d)", text) == ["1", "2", "0"] and "at 10" not in text  # the right one last


def test_damaged_and_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", 3)
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + '{"kind": "step", "iter')
    assert "3 of 400" in shown(folder)
    rows = [json.loads(line) for line in whole.splitlines()[-3:]]
    for damaged in ("no JSON", "[]", "{}", *(json.dumps(row | {name: value}) for row, name, value in zip(
            rows, ("loss", "num_samples", "samples"), ("high", None, 7), strict=True))):
        metrics.write_text(f"{damaged}\n{whole}")
        with pytest.raises(UserError, match=r"metrics\.jsonl:1: is not a row of a run's metrics .*remove that line"):
            html_of(folder)
    metrics.write_text(whole)
    (folder / "answers" / "iter_0000010").mkdir(parents=True)
    for name, content, what in (
        ("run.json", "{}", "the description of a run"), ("quarantine.jsonl", "{}\n", "a bad sample"),
        ("answers/iter_0000010/predictions.jsonl", '{"score": "x"}\n', "an answer"),
    ):
        path = folder / name
        before = path.read_text() if path.exists() else ""
        path.write_text(content)
        with pytest.raises(UserError, match=rf"{name}.*: is not {what} \(.*; "):
            html_of(folder)
        path.write_text(before)
    metrics.write_text("")
    assert main([str(folder)]) == 0
    assert "no step has been recorded yet" in (folder / "run.html").read_text()
    capsys.readouterr()
    assert main([str(tmp_path)]) == 2
    assert f"error: {tmp_path}: has no metrics.jsonl and run.json; give the --log-dir" in capsys.readouterr().err
    assert main([str(folder), "--html", str(tmp_path / "no" / "x.html")]) == 2


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_shows_it_without_scrolling_sideways(tmp_path: Path, width: int) -> None:
    page = html_of(write_run(tmp_path / "run", 500, mm_data="x" * 300))
    assert content_width(page, width, tmp_path) == width
