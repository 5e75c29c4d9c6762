"""--page: a real run keeps its page, and nothing that is wrong with the page ends a run."""

import json
import re
from pathlib import Path

from mm.training.run_page import RunPage
from tests.launch import run_ranks
from tests.page.runs import FACTS, step_row, write_run
from tests.tiny_inputs import short_flags, write_inputs


def test_a_run_keeps_its_page(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    data = json.loads((tmp_path / "data.json").read_text())
    data["dataset_param"]["basic_parameters"]["val_rate"] = 0.2
    (tmp_path / "data.json").write_text(json.dumps(data))
    run_ranks(2, "mm.train", *short_flags(
        tmp_path, "logs", "model_2", "data", 4, "--global-batch-size", "2", "--lr", "1e-3", "--page",
        "--eval-interval", "2", "--eval-generate-interval", "2", "--eval-generate-rule", "exact",
        "--eval-generate-questions", str(tmp_path / "samples.json"), "--eval-generate-max-new-tokens", "4",
        "--eval-generate-max-questions", "3", "--profile-pipeline", "3"))
    html = (tmp_path / "logs" / "run.html").read_text()
    for words in ("all 4 steps are done", "<dd>4 of 4 (100.0%), epoch", "Validations (2)", "Scored answers (2)",
                  "Slowest ranks at step 4", "pipeline_step_3.svg", "How many pictures are in sample number 2?",
                  "Peak memory of the stages"):
        assert words in html, words
    assert html.count("data:image/jpeg;base64,") == 3  # of samples 1 and 2, with one and two
    memory = re.findall(r"<tr><td>[01]</td>(?:<td>[\d.]+</td>){2}<td>([\d.]+)</td></tr>", html)
    assert len(memory) == 2 and all(float(one) > 0 for one in memory)
    assert json.loads((tmp_path / "logs" / "run.json").read_text())["ended"]["how"] == "all 4 steps are done"


def test_a_failure_is_said_once_and_the_next_refresh_tries_again(tmp_path: Path) -> None:
    said: list[str] = []
    folder = write_run(tmp_path / "run", 3)
    page = folder / "run.html"
    page.mkdir()  # a file cannot replace it
    kept = RunPage(folder / "metrics.jsonl", FACTS, said.append)
    for iteration in (4, 5):
        kept.fold(step_row(iteration))
        kept.refresh(True)
    (note,) = said
    assert "run.html cannot be written (IsADirectoryError" in note and "python -m mm.page" in note
    page.rmdir()
    kept.refresh(True)
    assert "5 of 400" in page.read_text() and len(said) == 1
    page.unlink()
    kept.refresh(False)
    assert not page.exists()  # neither news nor five minutes
    kept.end({"at": "now", "iteration": 5, "how": "all is done"})
    assert "all is done" in page.read_text()
