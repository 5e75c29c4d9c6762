"""docs/metrics.md lists the fields of metrics.jsonl: all that the code writes, and no others."""

import re
from dataclasses import replace
from pathlib import Path

from mm.config.args import parse
from mm.run.watch.metrics import MetricsWriter, ScoreMetrics, SpikeMetrics, ValidationMetrics
from mm.run.watch.step_timing import SlowRank
from tests.files import ROOT, json_lines
from tests.run.watch.test_metrics import STEP

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
    args = parse(["--mm-model", "m", "--mm-data", "d", "--micro-batch-size", "1", "--seq-length", "8", "--train-iters",
                  "9", "--lr", "1", "--log-dir", str(tmp_path)])  # fmt: skip
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
