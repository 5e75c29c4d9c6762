"""The page of a run says what its files say, for any run: long, short, damaged, hostile, or several."""

import base64
import json
import re
import shutil
import time
from dataclasses import replace
from datetime import datetime, timedelta
from html import unescape
from pathlib import Path

import pytest

from mm.errors import UserError
from mm.page.__main__ import main
from mm.page.facts import status
from mm.page.history import History
from mm.page.pages import run_page, runs_page
from mm.page.record import read_run, run_names
from tests.browser import WIDTHS, content_width, needs_browser
from tests.page.runs import step_row, write_run
from tests.page_reader import PageReader

NOW = datetime(2026, 11, 28, 13)


def shown(folder: Path) -> str:
    return PageReader(run_page(read_run(folder, "r"), NOW)).text


def test_the_page_says_what_the_files_say(tmp_path: Path) -> None:
    slow = {"ranks": [3], "stage": 1, "replica": 0, "hosts": ["n1"], "devices": ["npu:3"], "own_seconds": 2.0,
            "median_seconds": 1.0, "compared_with": "replicas", "share": 1.0}
    folder = write_run(tmp_path / "run", 100, lambda step: {"slowest_ranks": [slow], "stage_memory_bytes": [
        2**30 if step == 50 else 1, 2**31]} if step % 50 == 0 else {})
    (folder / "quarantine.jsonl").write_text("".join(json.dumps(
        {"dataset": "a.json", "line": number, "index": number, "id": None, "path": None, "reason": "is empty"}) + "\n"
        for number in range(60)) + '{"cut')
    text = shown(folder)
    for part in ("model.json (8 ViT layers + 4 LLM layers)", "tensor 2 x context 1 x pipeline 2 x data 1 = 4 ranks",
                 "torch 2.13.0", "2026-11-28 12:00:00", "100 of 400 (25.0%)", "4 min", "100, median of the last 100",
                 "unknown: no peak", "0.625, step 50", "Validations (1)", "the loss is 7", "unchanged",
                 "0, 1, 2, 3, 4, 5, 6, 7 and 82 more", "n1 npu:3", "2,000 ms", "+100%, other replicas",
                 "Samples left out (60; the first 50)", "a.json:49", "arguments.lr 1e-05"):
        assert part in text, part
    assert "a.weight" not in text and "a.json:50" not in text
    rows = re.findall(r"<tr><td>(\d)</td><td>([\d.]+)</td><td>([\d.]+)</td><td>([\d.]+)</td></tr>",
                      run_page(read_run(folder, "r"), NOW))
    assert rows == [("0", "1.00", "2.00", "1.00"), ("1", "3.00", "4.00", "2.00")]


def test_a_spike_in_a_long_run_is_on_the_page_and_lost_values_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3000, lambda step: {
        "loss": 5000.0 if step == 1234 else None if step in (7, 2000) else 1.25})
    html = run_page(read_run(folder, "r"), NOW)
    (loss,) = re.findall(r"<figure class=\"curve\"><figcaption>Loss <small>(.*?)</small>.*?<svg(.*?)</svg>", html)
    assert loss[0] == "(logarithmic; not finite: 2)" and loss[1].count("not finite, step") == 2
    tops = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", loss[1])]
    assert min(tops) < 20 and sorted(tops)[len(tops) // 2] > 150  # the spike is near the top, all else at the bottom


def test_a_hundred_thousand_rows_take_bounded_memory_and_a_fraction_of_a_millisecond_each() -> None:
    before, after = json.dumps(step_row(123456)).split("123456")
    num_steps, started = 100_000, time.process_time()
    history = History()
    history.fold_lines((f"{before}{step}{after}\n".encode() for step in range(1, num_steps + 1)), "metrics.jsonl")
    seconds = time.process_time() - started
    assert history.num_steps == num_steps and all(len(one.bins) <= 400 for one in history.curves.values())
    assert history.last is not None and history.last["iteration"] == num_steps
    assert seconds < 20, f"{seconds} s of processor time"  # a tenth of that on an idle machine


def test_the_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 5000, lambda step: {"loss": 1 + (step * 7919 % 1000) / 1000})
    assert len(run_page(read_run(folder, "r"), NOW)) < 500_000


def test_hostile_texts_are_text(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[31m"
    folder = write_run(tmp_path / "run", started_at=bad, arguments={"mm_model": bad, bad: bad})
    answers = folder / "answers" / "iter_0000010"
    answers.mkdir(parents=True)
    (answers / "predictions.jsonl").write_text(json.dumps(
        {"index": bad, "question": bad, "right": [bad], "prediction": bad, "score": 0.0}) + "\n")
    (folder / "pipeline_step_3.svg").write_text("<svg><script>alert(1)</script></svg>")
    (folder / "run.json").write_text(json.dumps(json.loads((folder / "run.json").read_text()) | {
        "ran_on": {"device": bad, "versions": {bad: bad}}}))
    html = run_page(read_run(folder, bad), NOW)
    reader = PageReader(html)
    assert reader.text.count("alert(1)") > 10 and "\x1b" not in html and "\u202e" not in html


def test_answers_with_their_images_and_their_history(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    rows = [{"index": str(number), "question": f"Which is it, {number}?", "right": ["7"], "options": {"A": "one"}}
            for number in range(3)]
    for iteration in range(10, 100, 10):
        (folder / "answers" / f"iter_{iteration:07d}").mkdir(parents=True)
        (folder / "answers" / f"iter_{iteration:07d}" / "predictions.jsonl").write_text("".join(json.dumps(
            row | {"prediction": f"at {iteration}", "score": float(number == 0 and iteration > 50)}) + "\n"
            for number, row in enumerate(rows)))
    shutil.copytree(folder / "answers" / "iter_0000090", folder / "answers" / "iter_0000090.copy")  # is ignored
    (folder / "answers" / "thumbnails").mkdir()
    for name in ("1_0", "1_1"):
        (folder / "answers" / "thumbnails" / f"{name}.jpg").write_bytes(b"JPEG")
    html = run_page(read_run(folder, "r"), NOW)
    text = PageReader(html).text
    assert html.count(base64.b64encode(b"JPEG").decode()) == 2
    assert re.findall(r"(\d)\. Which is it", text) == ["2", "3", "1"]  # the right one last
    assert re.findall(r"step (\d+) at \1 (\d+)%", text[text.index("1. Which") :]) == [
        ("10", "0"), ("30", "0"), ("50", "0"), ("70", "100"), ("90", "100")]


def test_whether_it_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run = read_run(folder, "r")
    written = datetime.fromtimestamp((folder / "metrics.jsonl").stat().st_mtime)
    assert not status(run, written + timedelta(seconds=60)).is_bad
    assert "60 s before" in status(run, written + timedelta(seconds=60)).text
    assert " 0 s before" in status(run, written - timedelta(seconds=60)).text
    silent = status(run, written + timedelta(hours=3))
    assert silent.is_bad and "No row for 3 h 0 min after step 100" in silent.text
    ended = write_run(tmp_path / "ended", ended={"at": "2026-11-28 14:00:00", "iteration": 100, "how": "all are done"})
    assert status(read_run(ended, "r"), NOW + timedelta(days=9)) == (
        "Ended at 2026-11-28 14:00:00: all are done.", False)


def test_a_torn_line_is_ignored_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + '{"kind": "step", "iter')
    assert "3 of 400" in shown(folder)
    for damaged in ("no JSON", "[]", '{"kind": "step", "iteration": 4}', '{"kind": "step", "iteration": "4"}', "{}"):
        metrics.write_text(f"{damaged}\n{whole}")
        with pytest.raises(UserError, match=r"metrics\.jsonl:1: is not a row of a run's metrics"):
            read_run(folder, "r")


def test_what_is_missing_is_said(tmp_path: Path, capsys) -> None:
    folder = write_run(tmp_path / "a" / "logs")
    (folder / "run.json").unlink()
    assert "has no run.json, so no settings are shown" in shown(folder)
    (tmp_path / "empty").mkdir()
    for path, message in ((tmp_path / "a", f"has no metrics.jsonl; expected the --log-dir of a run: give {folder}\n"),
                          (tmp_path / "empty", "has no metrics.jsonl; expected the --log-dir of a run: give that of"),
                          (tmp_path / "none", "is not a directory; expected the --log-dir of a run")):
        assert main([str(path)]) == 2
        assert f"error: {path}: {message}" in capsys.readouterr().err
    assert main([str(folder), str(folder)]) == 2 and "--html is missing" in capsys.readouterr().err
    assert main([str(folder), "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text("")
    assert main([str(folder)]) == 0
    assert "No step has been recorded yet." in (folder / "run.html").read_text()


def test_the_timeline_is_that_of_the_latest_measured_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("pipeline_step_9", "pipeline_step_10", "predicted_step_30", "compared_step_30"):
        (folder / f"{name}.svg").write_text("<svg/>")
    text = shown(folder)
    assert "Timeline of a step (pipeline_step_10.svg)" in text
    assert "Others in --log-dir: pipeline_step_9.svg" in text and "step_30" not in text


def test_a_run_that_was_resumed_with_more_stages(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 4, lambda iteration: {
        "stage_memory_bytes": [9 * 2**30] * 2 if iteration < 3 else [iteration * 2**30, 2**30, 2**30, 5 * 2**30]})
    assert read_run(folder, "r").history.stage_memory_bytes == [4 * 2**30, 2**30, 2**30, 5 * 2**30]


def test_metrics_that_were_moved_aside(tmp_path: Path, capsys) -> None:
    folder = write_run(tmp_path / "run", 3)
    shutil.copy(folder / "metrics.jsonl", folder / "metrics_20261128_120000_000000.jsonl")
    assert "earlier runs with this --log-dir: metrics_20261128_120000_000000.jsonl" in shown(folder)
    page = tmp_path / "old.html"
    assert main([str(folder / "metrics_20261128_120000_000000.jsonl")]) == 2
    assert "run.html is the page of a later run than metrics_20261128_120000" in capsys.readouterr().err
    assert main([str(folder / "metrics_20261128_120000_000000.jsonl"), "--html", str(page)]) == 0
    text = PageReader(page.read_text()).text
    assert "belongs to a later run" in text and "model.json" not in text and "0.625, step 50" in text


def test_two_runs_side_by_side(tmp_path: Path, capsys) -> None:
    one = write_run(tmp_path / "one" / "logs", arguments={"lr": 1e-5, "seed": 1})
    other = write_run(tmp_path / "two" / "logs", arguments={"lr": 3e-5, "seed": 1, "page": True})
    page = tmp_path / "both.html"
    assert main([str(one), str(other), "--html", str(page)]) == 0
    html = page.read_text()
    text = PageReader(html).text
    assert "Runs one and two" in text and "arguments.lr 1e-05 3e-05" in text and "arguments.page - True" in text
    assert "Settings that differ (2)" in text and "arguments.seed" not in text
    (loss,) = re.findall(r"<figcaption>Loss.*?<svg", html)
    legend = unescape(loss)
    for colour, name in (("#0072b2", "one"), ("#d55e00", "two")):
        assert f'<b style="color: {colour}">━</b> {name}<' in legend
    assert main([*[str(one)] * 7, "--html", str(page)]) == 2 and "at most 6" in capsys.readouterr().err


def test_settings_of_several_runs(tmp_path: Path) -> None:
    """What differs between any two runs is no difference; many differences are folded; absent settings are none."""
    for name, more in (("one", ""), ("same", ""), ("other", "abcdefghijklm"), ("bare", "")):
        arguments = {"log_dir": name, **dict.fromkeys(more, 1)}
        write_run(tmp_path / name, 3, arguments=arguments, started_at=name)
    (tmp_path / "bare" / "run.json").unlink()
    runs = {path.name: read_run(path, path.name) for path in tmp_path.iterdir()}

    def said(*names: str) -> str:
        return runs_page([runs[name] for name in names], NOW)

    assert "All settings are the same." in said("one", "same", "bare")
    assert "<details><summary>Settings that differ (13)</summary>" in said("one", "other")
    assert "Settings that differ" not in said("one", "bare") and "bare: " in said("one", "bare")
    assert "<h1>Runs one, same and other</h1>" in said("one", "same", "other")


@pytest.mark.parametrize(("num_steps", "parts"), [
    (40, ["━ each step"]), (100, ["● each step", "━ running mean"]),
    (1000, ["█ smallest to largest of 4 steps", "━ running mean"])])  # fmt: skip
def test_the_legend_of_one_run_says_what_is_drawn(tmp_path: Path, num_steps: int, parts: list[str]) -> None:
    text = shown(write_run(tmp_path / "run", num_steps))
    assert f"Loss {' '.join(parts)} ◆ validation ✕ bad step or spike" in text
    assert f"Step time (s) {' '.join(parts) if len(parts) > 1 else ''}".strip() in text


def test_bands_of_several_runs_hide_no_line(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", 1000, lambda step: {"loss": 1 + step % 7}), "r")
    (loss,) = re.findall(r"<figcaption>Loss.*?</svg>", runs_page([run, replace(run, name="s")], NOW))
    opacities = re.findall(r'Z" fill="[^"]*" stroke="[^"]*" stroke-width="0.7" opacity="([\d.]+)"', loss)
    assert opacities == ["0.1", "0.1"] and loss.rindex('opacity="0.1"') < loss.index('stroke-width="1.8"')


def test_names_of_runs(tmp_path: Path) -> None:
    assert run_names([tmp_path / "a/logs"]) == ["a/logs"] and run_names([tmp_path / "a"]) == ["a"]
    assert run_names([tmp_path / "a/logs", tmp_path / "b/logs"]) == ["a", "b"]
    assert run_names([tmp_path / name / "run/logs" for name in ("a/x", "b/x", "b/y")]) == ["a/x", "b/x", "b/y"]
    assert run_names([tmp_path / "a/logs", tmp_path / "a/logs/metrics_1.jsonl"]) == ["logs", "metrics_1.jsonl"]
    assert run_names([tmp_path / "a", tmp_path / "a"]) == ["/".join(tmp_path.parts[1:]) + "/a"] * 2


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_shows_it_without_scrolling_sideways(tmp_path: Path, width: int) -> None:
    folder = write_run(tmp_path / "run", 500, mm_data="x" * 300)
    run = read_run(folder, "r")
    assert content_width(run_page(run, NOW), width, tmp_path) == width
    several = [replace(run, name=f"{number}{'y' * 40}", facts={**run.facts, "seed": number}) for number in range(6)]
    assert content_width(runs_page(several, NOW), width, tmp_path) == width
