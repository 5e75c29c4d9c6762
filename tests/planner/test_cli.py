"""``mm-plan`` from the command line: real processes measure this machine, runs are predicted from what they wrote."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mm.config.run import load_run
from mm.model.flops import Backward
from mm.plan.calibration import read_calibration
from mm.plan.costs import COUNTS
from mm.plan.predict import Predictor
from mm.plan.workload import Workload
from mm.planner import cli
from mm.version import CODE
from tests.files import ROOT
from tests.tiny_inputs import flags_of, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("plan"))
    words = [sys.executable, "-m", "mm.planner.cli", "calibrate", "--output", str(folder / "found.json"),
             "--num-processes", "2", "--", *flags_of(folder, "a run", 1)]  # fmt: skip
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kinds of blocks; usual error of a law " in done.stdout
    assert "each of 2 devices: " in done.stdout and "TFLOP/s in matrix products" in done.stdout
    return folder


def said(capsys: pytest.CaptureFixture, status: int, *words: str | Path) -> str:
    assert cli.main([*map(str, words)]) == status
    out, err = capsys.readouterr()
    return err if status else out


def test_every_kind_of_block_is_measured_in_every_way_that_training_uses_it(inputs: Path) -> None:
    found = read_calibration(inputs / "found.json")
    ways = {(one.key.kind, one.key.backward) for one in found.blocks}
    layers = ("window-attention ViT layer", "full-attention ViT layer", "LLM layer")
    assert ways >= {(kind, one.name) for kind in layers for one in (Backward.WEIGHTS, Backward.INPUT)}
    assert {kind for kind, _ in ways} == {*layers, "patch embedding", "projector", "word embedding", "norm and head"}
    assert found.machine.num_processes == 2
    assert set(found.all_reduce) == {2}
    assert found.message is not None
    assert found.message.seconds(1 << 20) > 0
    assert found.step.seconds(1e6) > 0
    assert found.speeds is not None and min(dataclasses.astuple(found.speeds)) > 0
    assert found.pipeline_pass is not None and found.pipeline_pass >= 0


def test_a_run_is_predicted_from_its_flags(inputs: Path, capsys: pytest.CaptureFixture) -> None:
    for num_stages in (1, 2):
        flags = flags_of(inputs, "a run", num_stages, "--world-size", "2")
        text = said(capsys, 0, "predict", "--calibration", inputs / "found.json", "--", *flags)
        seconds = float(text.split()[1])
        assert 0 < seconds < 60
        assert ("Stages    wait for" in text) == (num_stages == 2)
        assert "Tokens" in text and "2 processes at a time" in text


def test_more_work_takes_longer(inputs: Path) -> None:
    run = load_run([*flags_of(inputs, "a run", 1), "--dry-run"], 1)
    calibration = read_calibration(inputs / "found.json")
    predictor = Predictor(run, calibration)
    counts = np.zeros((1, len(COUNTS)))
    counts[:, [COUNTS.index(name) for name in ("num_tokens", "num_causal_pairs", "num_target_tokens")]] = 400, 9e4, 300
    once, twice = (predictor.predict(Workload(((np.repeat(counts, count, axis=0),),))) for count in (1, 2))
    assert twice.pipeline == pytest.approx(2 * once.pipeline)


def test_what_cannot_be_predicted_is_refused(inputs: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    flags = flags_of(inputs, "a run", 1)
    found = json.loads((inputs / "found.json").read_text())
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps({**found, "message": None, "all_reduce": {}}))
    text = said(capsys, 2, "predict", "--calibration", alone, "--", *flags_of(inputs, "a run", 2, "--world-size", "2"))
    assert "give mm-plan calibrate --num-processes 2 or more" in text
    text = said(capsys, 2, "predict", "--calibration", inputs / "found.json", "--", *flags, "--lora-r", "4",
                "--lora-target-modules", "all-linear")  # fmt: skip
    assert "the calibration has no " in text and "run mm-plan calibrate with the flags of this run" in text
    for name, content, message in (("old", {**found, "format": 0}, "the format is 0; expected 2"),
                                   ("odd", {**found, "blocks": 3}, "blocks: "), ("list", [], "the format is None")):
        (tmp_path / name).write_text(json.dumps(content))
        assert message in said(capsys, 2, "predict", "--calibration", tmp_path / name, "--", *flags)
    assert "cannot be read" in said(capsys, 2, "predict", "--calibration", tmp_path / "none", "--", *flags)
    text = said(capsys, 2, "calibrate", "--output", tmp_path, "--", *flags)
    assert "expected a file in an existing directory" in text
    text = said(capsys, 2, "calibrate", "--output", tmp_path / "new", "--", *flags, "--tensor-model-parallel-size", "2",
                "--world-size", "2")  # fmt: skip
    assert "--tensor-model-parallel-size is 2, but --num-processes is 1" in text
    assert "--mm-model is missing" in said(capsys, 2, "predict", "--calibration", inputs / "found.json")


def test_lists_are_judged_and_better_ones_found(inputs: Path, capsys: pytest.CaptureFixture) -> None:
    """The whole LLM beside half of the ViT is far from even."""
    model = json.loads((inputs / "model_2.json").read_text())
    model["image_encoder"]["vision_encoder"]["pipeline_num_layers"] = [1, 7]
    model["text_decoder"]["pipeline_num_layers"] = [0, 4]
    (inputs / "uneven.json").write_text(json.dumps(model))
    flags = [*flags_of(inputs, "a run", 2, "--world-size", "2"), "--mm-model", str(inputs / "uneven.json")]
    text = said(capsys, 0, "lists", "--", *flags)
    found = {name: float(line.split("stages used ")[1].split("%")[0]) for line in text.splitlines()
             for name in ("Present", "Best") if line.startswith(name)}  # fmt: skip
    assert found["Best"] > found["Present"]
    assert "Unit      every FLOP takes the same time" in text
    new = json.loads(re.search(r"vision_encoder\.pipeline_num_layers: (.*)", text)[1])
    assert sum(new) == 8 and new[0] > 1
    text = said(capsys, 0, "lists", "--calibration", inputs / "found.json", "--memory-gib", "1", "--", *flags)
    assert re.search(r"Present +ViT \[1, 7\], LLM \[0, 4\]: pipeline .* s, stages used", text) and "Unit" not in text
    text = said(capsys, 2, "lists", "--", *flags_of(inputs, "a run", 1))
    assert "has one pipeline stage, so there are no lists to choose" in text


def test_a_calibration_of_another_machine_is_used_only_with_a_flag(
    inputs: Path, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    found = json.loads((inputs / "found.json").read_text())
    found["machine"] |= {"device": "H200", "precision": "bf16", "exp_avg_dtype": "bf16", "kept_copy": "none"}
    found["machine"]["versions"] |= {"torch": "1.0", CODE: "other"}
    old = tmp_path / "old.json"
    old.write_text(json.dumps(found))
    differences = ("was measured on H200, but this device is cpu", "was measured in bf16, but the run is in fp32",
                   "was measured with --exp-avg-dtype bf16, but the run has fp32",
                   "was measured with --main-params-dtype bf16, but the run has fp32 copies of 16-bit weights",
                   "was measured with torch 1.0, but here it is ")  # fmt: skip
    training = ["--world-size", "2", *flags_of(inputs, "a run", 2)]
    for words in (["predict", "--calibration", str(old), "--", *training],
                  ["lists", "--calibration", str(old), "--", *training],
                  ["--calibration", str(old), "--fix", "PP=1/2", "--", *training]):  # fmt: skip
        text = said(capsys, 2, *words)
        assert all(f"{old}: {one}" in text for one in differences) and "add --accept-calibration" in text
        place = words.index("--calibration")
        assert cli.main([*words[:place], "--accept-calibration", *words[place:]]) == 0
        said_too = capsys.readouterr().err
        assert all(one in said_too for one in (
            *differences, "was measured with the code in mm/ other, but here it is "))
