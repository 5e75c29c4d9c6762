"""``mm-plan`` from the command line: real processes measure this machine, runs are predicted from what they wrote."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from mm.cost.calibration import read_calibration
from mm.environment import CODE
from mm.model.flops import Backward
from mm.plan import cli
from tests.files import ROOT
from tests.launch import warm_python
from tests.tiny_inputs import flags_of, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("plan"))
    words = [warm_python(), "-m", "mm.plan.cli", "calibrate", "--output", str(folder / "found.json"),
             "--num-processes", "2", "--", *flags_of(folder, "a run", 1)]  # fmt: skip
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kinds of blocks; usual error of a law " in done.stdout
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
    assert found.host_bytes is not None and found.host_bytes > 0


def test_a_run_is_predicted_from_its_flags(inputs: Path, capsys: pytest.CaptureFixture) -> None:
    for num_stages in (1, 2):
        flags = flags_of(inputs, "a run", num_stages, "--world-size", "2")
        text = said(capsys, 0, "predict", "--calibration", inputs / "found.json", "--", *flags)
        seconds = float(text.split()[1])
        assert 0 < seconds < 60
        assert ("Stages    wait for" in text) == (num_stages == 2)
        assert "Tokens" in text and "2 processes at a time" in text


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
    for name, content, message in (("old", {**found, "format": 0}, "the format is 0; expected 3"),
                                   ("odd", {**found, "blocks": 3}, "blocks: "), ("list", [], "the format is None")):
        (tmp_path / name).write_text(json.dumps(content))
        assert message in said(capsys, 2, "predict", "--calibration", tmp_path / name, "--", *flags)
    text = said(capsys, 2, "calibrate", "--output", tmp_path, "--", *flags)
    assert "expected a file in an existing directory" in text
    text = said(capsys, 2, "calibrate", "--output", tmp_path / "new", "--", *flags, "--tensor-model-parallel-size", "2",
                "--world-size", "2")  # fmt: skip
    assert "--num-processes is 1; expected a multiple of --tensor-model-parallel-size, which is 2" in text
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
    found["machine"] |= {"device": "H200", "precision": "bf16"}
    found["machine"]["settings"] |= {"torch": "1.0", "--exp-avg-dtype": "bf16", CODE: "other"}
    old = tmp_path / "old.json"
    old.write_text(json.dumps(found))
    differences = ("was measured on H200, but this device is cpu", "was measured in bf16, but the run is in fp32",
                   "was measured with --exp-avg-dtype bf16, but here it is fp32",
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
