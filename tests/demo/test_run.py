"""The demo over a few steps: all its stages, without the required accuracy."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, tensor

from demo import golden
from demo.even_odd import Learnt
from demo.planned import Planner
from demo.run import (
    FULL,
    MINIMUM_EVEN_ODD_ACCURACY,
    PICTURED_ITERATION,
    PIPELINE,
    QUICK,
    TENSOR,
    DemoError,
    max_abs_diff,
)
from mm.cost.calibration import read_calibration
from tests.files import json_lines
from tests.launch import warm_python


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files left by ``python -m demo.run --quick``."""
    path = tmp_path_factory.mktemp("runs") / "demo"
    command = [str(warm_python()), "-m", "demo.run", "--quick", "--directory", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def metrics(directory: Path) -> list[dict]:
    return json_lines(directory / "logs/metrics.jsonl")


def test_summary_says_what_was_measured(directory: Path):
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["quick"] is True
    assert summary["num_held_out"] == summary["num_held_out_videos"] == QUICK.num_held_out // 2
    assert 0 <= summary["held_out_accuracy"] <= 1 and 0 <= summary["held_out_video_accuracy"] <= 1
    assert summary["num_even_odd_questions"] == summary["num_held_out"]
    for name in ("before", "after"):
        overall = json.loads((directory / f"even_odd/{name}/scores.json").read_text())["overall"]
        assert overall["num_questions"] == summary["num_even_odd_questions"]
        assert overall["score_percent"] / 100 == summary[f"even_odd_accuracy_{name}_lora"]
    assert 0 <= summary["hf_logits_max_abs_diff"] < 1e-3
    lists = Planner(directory / "plan", {}).lists()
    assert summary["layouts"] == [str(replace(PIPELINE, vision=lists[0], language=lists[1])), str(TENSOR)]
    assert summary["final_loss"] == metrics(directory)[-1]["loss"]
    assert 0 <= summary["golden_losses_max_rel_diff"] <= golden.of_device("cpu").tolerance
    assert set(summary["versions"]) == {"torch", "megatron-core", "transformers"}


def test_the_layout_is_planned_and_the_step_compared_with_its_prediction(directory: Path):
    summary, plan = json.loads((directory / "summary.json").read_text()), directory / "plan"
    assert read_calibration(plan / "calibration.json").machine.num_processes == 2
    assert summary["predicted_step_seconds"] > 0 and summary["measured_step_seconds"] > 0
    assert "layout 1: " in (plan / "layouts.log").read_text()
    picture = (plan / f"compared_step_{PICTURED_ITERATION}.svg").read_text()
    assert picture.index("Predicted step") < picture.index("Measured step")
    trained = json.loads((directory / "model_tp1_pp2.json").read_text())
    assert trained == json.loads((plan / "model.json").read_text())


def test_the_second_layout_resumes_where_the_first_stopped(directory: Path):
    records = metrics(directory)
    assert [record["iteration"] for record in records] == list(range(1, QUICK.train_iters + 1))
    # The warm-up is longer than this: the same rise at each step.  A schedule that started anew would fall back to 0.
    rates = [record["lr"] for record in records]
    assert rates == pytest.approx([step * rates[1] for step in range(QUICK.train_iters)])
    losses = [record["loss"] for record in records]
    assert losses[QUICK.exit_iteration] < losses[0], "the resumed run started from scratch"


def test_adapters_are_trained_beside_the_export_on_another_question(directory: Path):
    config = json.loads((directory / "even_odd/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(directory / "hf")
    assert len(metrics(directory / "even_odd")) == QUICK.even_odd_iters
    asked = json.loads((directory / "digits/even_odd_held_out.json").read_text())
    read = [one for one in json.loads((directory / "digits/held_out.json").read_text()) if one["images"]]
    assert [one["images"] for one in asked] == [one["images"] for one in read]
    assert [one["messages"][1]["content"] for one in asked] == [
        ("even", "odd")[int(one["messages"][1]["content"]) % 2] for one in read]


@pytest.mark.parametrize(("before", "after", "is_enough"), [(0.0, 0.95, True), (0.0, 0.85, False), (0.9, 0.95, False)])
def test_adapters_that_teach_nothing_fail_the_demo(before: float, after: float, is_enough: bool):
    learnt = Learnt(before, after, 360)
    if is_enough:
        learnt.check(MINIMUM_EVEN_ODD_ACCURACY)
        return
    with pytest.raises(DemoError, match=f"{before:.1%} are right without adapters, {after:.1%} with them"):
        learnt.check(MINIMUM_EVEN_ODD_ACCURACY)


def test_the_quick_run_is_the_beginning_of_the_full_one():
    assert QUICK.schedule_iters == FULL.schedule_iters >= FULL.train_iters
    assert QUICK.train_iters == golden.NUM_STEPS < FULL.exit_iteration


def test_the_first_losses_are_the_golden_ones(directory: Path):
    expected = golden.of_device("cpu")
    assert [record["loss"] for record in metrics(directory)] == pytest.approx(expected.losses, rel=expected.tolerance)


def test_pictures_can_be_looked_at(directory: Path):
    for name in ("loss.png", "answers.png", "video_answers.png"):
        with Image.open(directory / name) as picture:
            assert min(picture.size) >= 300
            assert len(set(picture.convert("L").tobytes())) > 10
    timeline = (directory / f"logs/pipeline_step_{PICTURED_ITERATION}.svg").read_text(encoding="utf-8")
    assert timeline.startswith("<svg") and "Microbatches: 8, stages: 2," in timeline


def test_the_export_is_a_complete_checkpoint(directory: Path):
    exported = {path.name for path in (directory / "hf").iterdir()}
    assert {"config.json", "generation_config.json", "preprocessor_config.json", "tokenizer.json"} <= exported
    assert any(name.endswith(".safetensors") for name in exported)


def test_it_starts_over_only_in_its_own_directory(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    command = [str(warm_python()), "-m", "demo.run", "--quick", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "has files that the demo did not write" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def write_logits(path: Path, logits: Tensor, token_ids: Tensor) -> Path:
    save_file({"logits.0": logits, "token_ids.0": token_ids}, path)
    return path


def test_logits_of_other_tokens_are_not_compared(tmp_path: Path):
    ours = write_logits(tmp_path / "a", tensor([[0.0, 1.0]]), tensor([3]))
    same = write_logits(tmp_path / "b", tensor([[0.25, 1.0]]), tensor([3]))
    other = write_logits(tmp_path / "c", tensor([[0.0, 1.0]]), tensor([4]))
    assert max_abs_diff(same, ours) == 0.25
    with pytest.raises(DemoError, match=r"token_ids.0 is \[4\] in transformers and \[3\] in the trainer"):
        max_abs_diff(other, ours)
