"""The log line has MindSpeed-MM's format: its awk scripts still work.  docs/metrics.md lists what is written."""

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mm.config.args import parse
from mm.errors import UserError
from mm.run.watch.metrics import (
    MetricsWriter,
    ScoreMetrics,
    SpikeMetrics,
    StepMetrics,
    ValidationMetrics,
    _keep_before,
    log_line,
)
from mm.run.watch.step_timing import SlowRank
from mm.timeline import TIMED, seconds_key
from tests.files import ROOT, json_lines
from tests.killed import run_killed

STEP = StepMetrics(
    iteration=5, consumed_samples=960, loss=1.25, lr=1e-5, grad_norm=2.0, loss_scale=1.0, step_seconds=0.87004,
    global_batch_size=192, num_tokens=192 * 689, num_target_tokens=1000, num_patches=4000, num_images=100,
    num_omitted_images=0, tokens_per_second_per_device=100.0, model_flops_per_second_per_device=1e12, mfu=None,
    max_memory_bytes=1, updated=True,
)  # fmt: skip
BASE = ("--mm-model", "m", "--mm-data", "d", "--micro-batch-size", "1", "--seq-length", "8", "--train-iters", "9",
        "--lr", "1")  # fmt: skip


def _awk(line: str, program: str, separator: str) -> str:
    words = ["awk", "-F", separator, program]
    return subprocess.run(words, input=line, capture_output=True, text=True, check=True).stdout.strip()


def test_the_line_equals_mindspeeds_whose_awk_script_reads_it() -> None:
    line = log_line([STEP], 10000, log_tps=True, log_throughput=False)
    assert _awk(_awk(line, "{print$5}", ":"), "{print$1}", "|") == "870.0"
    assert _awk(_awk(line, "{print$2}", "tokens per sample:"), "{print$1}", "|") == "689.0"
    assert re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", line) == (
        " [TIME] iteration        5/   10000 | consumed samples:          960 | elapsed time per iteration (ms): 870.0 "
        "| learning rate: 1.000000E-05 | global batch size:   192 | tokens per sample: 689.0 | loss: 1.250000E+00 "
        "| loss scale: 1.0 | grad norm: 2.000 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    assert "tokens per sample" not in log_line([STEP], 10000, log_tps=False, log_throughput=False)


def test_the_time_split_is_a_mean_at_the_end_of_the_line() -> None:
    timed = [replace(STEP, timers={seconds_key(work): 0.001 * (index + 1) for work in TIMED}) for index in (1, 3)]
    line = log_line(timed, 10000, log_tps=True, log_throughput=False)
    _, _, added = line.partition("number of nan iterations:   0 | most of any rank (ms): ")
    assert added == ("waits for data 3.0, inputs 3.0, other forward 3.0, ViT forward 3.0, LLM forward 3.0, backward "
                     "3.0, messages 3.0, visual tokens 3.0, gathers weights 3.0, gradient reduction 3.0, update 3.0, "
                     "waits in update 3.0 |")
    assert _awk(_awk(line, "{print$5}", ":"), "{print$1}", "|") == "870.0"


def test_a_resumed_run_continues_the_file_without_gaps_or_doubles(tmp_path: Path, capsys) -> None:
    args = parse([*BASE, "--log-dir", str(tmp_path), "--log-interval", "2", "--tensorboard-dir",
                  str(tmp_path / "board")])
    first = MetricsWriter(args, {"a": 1}, 0)
    for iteration in range(1, 6):
        first.write(replace(STEP, iteration=iteration))
    first.close()
    assert capsys.readouterr().out.count("elapsed time per iteration") == 2
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "metrics.jsonl").rename(tmp_path / "elsewhere" / "rows")
    os.mkfifo(tmp_path / "metrics.jsonl")
    for first_iteration in (0, 3):
        with pytest.raises(UserError, match=r"metrics.jsonl cannot be written .*not a regular file.*remove it"):
            MetricsWriter(args, {"a": 1}, first_iteration)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("elsewhere/rows")
    second = MetricsWriter(args, {"a": 1}, 3)
    for iteration in range(4, 8):
        second.write(replace(STEP, iteration=iteration, loss=9.0))
    second.close()
    rows = json_lines(tmp_path / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, 8))
    assert [row["loss"] for row in rows] == [1.25] * 3 + [9.0] * 4
    assert json.loads((tmp_path / "run.json").read_text()) == {"a": 1}
    MetricsWriter(args, {}, 0).close()
    aside = [path for path in tmp_path.glob("metrics_*.jsonl")]
    assert {row["kind"] for row in rows} == {"step"}
    assert (tmp_path / "metrics.jsonl").read_text() == "" and len(aside[0].read_text().splitlines()) == 7
    assert list((tmp_path / "board").iterdir())


def test_a_resumed_run_that_is_killed_at_once_loses_no_row(tmp_path: Path) -> None:
    """Whichever disk change is the last, the file exists with all rows that are kept."""
    path = tmp_path / "metrics.jsonl"
    rows = "".join(json.dumps({"kind": "step", "iteration": iteration}) + "\n" for iteration in range(1, 6)) + '{"it'
    point, was_killed = 0, True
    while was_killed:
        point += 1
        path.write_text(rows)
        was_killed = run_killed(lambda: _keep_before(path, 3), after=point)
        found = path.read_text()
        assert found in (rows, "".join(rows.splitlines(keepends=True)[:3]))
    assert point > 2 and found != rows
    _keep_before(path, 3)
    assert [row["iteration"] for row in json_lines(path)] == [1, 2, 3]


def test_epoch_and_time_left_end_the_line() -> None:
    """After MindSpeed-MM's fields, because its scripts split at colons and count from the start."""
    line = log_line([replace(STEP, epoch=1.25)], 10000, log_tps=True, log_throughput=False, seconds_left=7984.6)
    plain = log_line([STEP], 10000, log_tps=True, log_throughput=False)
    assert line[22:] == f"{plain[22:]} epoch: 1.250 | time left: 2 h 13 min |"
    assert _awk(_awk(line, "{print$5}", ":"), "{print$1}", "|") == "870.0"


def test_the_time_left_is_computed_from_the_median_step(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    args = parse([*BASE, "--train-iters", "10", "--log-dir", str(tmp_path), "--log-interval", "1"])
    writer = MetricsWriter(args, {}, 0)
    for iteration, seconds in enumerate((500.0, 60.0, 61.0), start=1):
        writer.write(replace(STEP, iteration=iteration, step_seconds=seconds, epoch=iteration / 8))
    writer.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("time left: ")[2] for line in lines] == ["75 min |", "37 min |", "7 min |"]
    assert [row["epoch"] for row in json_lines(tmp_path / "metrics.jsonl")] == [0.125, 0.25, 0.375]


PAGE = ROOT / "docs" / "metrics.md"


def listed(heading: str) -> list[tuple[str, bool]]:
    """The fields of the table under a heading, and whether each goes to the trackers."""
    (section,) = re.findall(rf"^#+ .*{heading}.*?\n(.*?)(?=^#|\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    rows = re.findall(r"^\| (`.*?) \| (?:(t|) ?\| )?", section, re.M)
    return [(name, is_tracked == "t") for names, is_tracked in rows for name in re.findall(r"`(\w+)`", names)]


class Heard:
    """A tracker."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def log(self, values: dict[str, float], iteration: int) -> None:
        self.names |= set(values)

    def close(self) -> None: ...


def test_the_page_lists_what_is_written(tmp_path: Path) -> None:
    args = parse([*BASE, "--log-dir", str(tmp_path)])
    writer = MetricsWriter(args, {}, 0)
    heard: dict[str, Heard] = {}

    def hear(kind: str) -> None:
        heard[kind] = Heard()
        writer._trackers = [heard[kind]]

    hear("step")
    slow = SlowRank((1,), 0, 1, ("n0",), ("cpu",), 1.0, 0.5, "replicas", 1.0)
    writer.write(replace(STEP, mfu=0.5, epoch=1.0, slowest_rank_share=1.0, slowest_ranks=(slow,)))
    hear("validation")
    writer.write_validation(ValidationMetrics(1, 1, 1.0, 1, 1, 1.0, 1.0, 1))
    hear("score")
    writer.write_score(ScoreMetrics(1, 1, 1.0, 1, 0, 1.0), "benchmark")
    hear("spike")
    writer.write_spike(SpikeMetrics(1, "it is", True, 1.0, 1.0, (1, 2)))
    writer.close()
    rows = {row.pop("kind"): row for row in json_lines(tmp_path / "metrics.jsonl")}
    assert set(re.findall(r'`"kind": "(\w+)"`', PAGE.read_text(encoding="utf-8"))) == set(rows)
    for kind, row in rows.items():
        found = listed(f'`"kind": "{kind}"`')
        assert [name for name, _ in found] == list(row), kind
        assert {name for name, is_tracked in found if is_tracked} == heard[kind].names, kind
    assert [name for name, _ in listed("The slowest ranks")] == list(rows["step"]["slowest_ranks"][0])
