"""``mm-data`` as its users call it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from demo.tiny_checkpoint import build
from mm.config.run import load_run
from mm.data.index.dataset import Dataset
from mm.data.index.gauge import Gauge
from mm.data_tool.cli import main
from mm.training.preflight import check
from tests.data.oracle import photo
from tests.files import EXAMPLES, ROOT, json_lines
from tests.tiny_inputs import write_data

LLAVA = [
    {"id": "1", "image": "1.png", "conversations": [{"from": "human", "value": "<image>?"},
                                                    {"from": "gpt", "value": "猫"}]},
    {"id": "2", "image": "lost.png", "conversations": [{"from": "human", "value": "<image>?"},
                                                       {"from": "gpt", "value": "?"}]},
    {"id": "3", "video": ["v.mp4"], "conversations": [{"from": "human", "value": "<video>"},
                                                      {"from": "gpt", "value": "!"}]},
]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    (tmp_path / "media").mkdir()
    photo(60, 60).save(tmp_path / "media/1.png")
    (tmp_path / "media/v.mp4").touch()
    (tmp_path / "llava.json").write_text(json.dumps(LLAVA))
    build(tmp_path / "hf", ["One? 1", "Two and three and four? They are of no use here."], seed=0)
    write_data(tmp_path, tmp_path / "llava.json", dataset_dir=str(tmp_path / "media"), val_rate=None)
    return tmp_path


def index(inputs: Path, *more: str) -> int:
    return main(["index", "--mm-data", str(inputs / "data.json"), "--mm-model", str(EXAMPLES / "model_tiny.json"),
                 "--seq-length", "64", *more])


def convert(inputs: Path, output: str, *more: str) -> int:
    return main(["convert", "llava", "--input", str(inputs / "llava.json"), "--media-folder", str(inputs / "media"),
                 "--output", str(inputs / output), *more])


def test_index(inputs: Path, capsys):
    (inputs / "llava.json").write_text(json.dumps(LLAVA[:1]))
    assert index(inputs) == 0
    assert capsys.readouterr().out.startswith("training: 1 sample, ")
    (rows,) = (inputs / "media/.mm-index").glob("*.npy")
    made = rows.stat().st_mtime_ns
    assert index(inputs) == 0 and rows.stat().st_mtime_ns == made
    assert index(inputs, "--again") == 0 and rows.stat().st_mtime_ns > made


def test_training_uses_the_index_created_beforehand(inputs: Path, monkeypatch):
    (inputs / "llava.json").write_text(json.dumps(LLAVA[:1]))
    assert index(inputs) == 0
    run = load_run(["--mm-model", str(EXAMPLES / "model_tiny.json"), "--mm-data", str(inputs / "data.json"),
                    "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3", "--seq-length", "64",
                    "--log-dir", str(inputs / "logs")], 2, {})
    monkeypatch.delattr("mm.data.index.indexed_file.make_index")
    found = check(run)
    assert found.problems == [] and not any("index" in note for note in found.notes)
    assert len(Dataset(run.data, gauge=Gauge.from_config(run.data, run.model, 64), seed=run.args.seed)) == 1


def test_index_of_bad_samples(inputs: Path, capsys):
    (inputs / "llava.json").write_text(json.dumps(LLAVA[:2]))
    assert index(inputs) == 2
    reported = capsys.readouterr()
    problem = f"{inputs}/llava.json:1: record 1 (counted from 0, id '2'): image 'lost.png'"
    assert reported.out == "" and reported.err.startswith(f"error: {problem}")
    assert index(inputs, "--bad-sample", "skip") == 0
    out = capsys.readouterr().out
    assert "training: 1 sample" in out and f"note: left out: {problem}" in out


def test_index_of_a_validation_set_too(inputs: Path, capsys):
    data = json.loads((inputs / "data.json").read_text())
    data["dataset_param"]["basic_parameters"]["val_rate"] = 0.5
    (inputs / "data.json").write_text(json.dumps(data))
    (inputs / "llava.json").write_text(json.dumps(LLAVA[:1] * 4))
    assert index(inputs) == 0
    out = capsys.readouterr().out
    assert "training: 2 samples" in out and "validation: 2 samples" in out


def test_convert(inputs: Path, capsys):
    assert convert(inputs, "out.json") == convert(inputs, "out.jsonl") == 0
    assert "2 records; 1 left out" in capsys.readouterr().out
    records = json.loads((inputs / "out.json").read_text())
    assert records == json_lines(inputs / "out.jsonl")
    assert records[0] == {"id": "1", "images": [f"{inputs}/media/1.png"], "messages": [
        {"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "猫"}]}
    assert (records[1]["images"], records[1]["videos"]) == ([], [f"{inputs}/media/v.mp4"])
    assert convert(inputs, "out.json") == 2 and "out.json already exists" in capsys.readouterr().err


def test_keys_that_would_change_what_is_learnt_are_kept(inputs: Path, capsys):
    """The trainer refuses them in the converted file as in LLaVA's."""
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "No.", "loss": False}]
    (inputs / "llava.json").write_text(json.dumps([{"conversations": turns, "rejected": "Yes.", "source": "x"}]))
    assert convert(inputs, "out.json") == 0
    (record,) = json.loads((inputs / "out.json").read_text())
    assert record == {"rejected": "Yes.", "source": "x", "images": [], "messages": [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "No.", "loss": False}]}


def test_a_lone_surrogate_is_kept(inputs: Path, capsys):
    turns = [{"from": "human", "value": "\ud83d <猫>"}, {"from": "gpt", "value": "\u00e9"}]
    (inputs / "llava.json").write_text(json.dumps([{"conversations": turns}]))
    assert convert(inputs, "out.json") == 0
    (record,) = json.loads((inputs / "out.json").read_text(encoding="utf-8"))
    assert [turn["content"] for turn in record["messages"]] == [turn["value"] for turn in turns]


def test_mistakes_leave_no_output(inputs: Path, capsys):
    for content, what in (("[3]", "has no list of 'conversations'"), ('[{"conversations": [{}]}]', "a turn without"),
                          ('[{"conversations": [], "image": 3}]', "expected a path"), ("[{}", "found the end of the"),
                          ("{'a'}", "llava.json:1:2: record 0 (counted from 0): not valid JSON")):
        (inputs / "llava.json").write_text(content)
        assert convert(inputs, "out.json") == 2
        assert what in capsys.readouterr().err and not (inputs / "out.json").exists()


def test_as_a_program():
    done = subprocess.run([sys.executable, "-m", "mm.data_tool.cli", "index", "--mm-data", "no.json", "--mm-model", "x",
                           "--seq-length", "8"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "no.json: cannot be read" in done.stderr and "Traceback" not in done.stderr
