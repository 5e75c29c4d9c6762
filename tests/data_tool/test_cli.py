"""``mm-data index``, and the command as its users call it."""

import json
from pathlib import Path

import pytest

from demo.tiny_checkpoint import build
from mm.config.run import load_run
from mm.data.index.dataset import Dataset
from mm.data.index.gauge import Gauge
from mm.data_tool.cli import main
from mm.training.preflight import check
from tests.data.oracle import photo
from tests.files import EXAMPLES
from tests.tiny_inputs import write_data

LLAVA = [
    {"id": "1", "image": "1.png", "conversations": [{"from": "human", "value": "<image>?"},
                                                    {"from": "gpt", "value": "猫"}]},
    {"id": "2", "image": "lost.png", "conversations": [{"from": "human", "value": "<image>?"},
                                                       {"from": "gpt", "value": "?"}]},
]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    (tmp_path / "media").mkdir()
    photo(60, 60).save(tmp_path / "media/1.png")
    (tmp_path / "llava.json").write_text(json.dumps(LLAVA[:1] * 4))
    build(tmp_path / "hf", ["One? 1", "Two and three and four? They are of no use here."], seed=0)
    write_data(tmp_path, tmp_path / "llava.json", dataset_dir=str(tmp_path / "media"), val_rate=0.5)
    return tmp_path


def index(inputs: Path, *more: str) -> int:
    return main(["index", "--mm-data", str(inputs / "data.json"), "--mm-model", str(EXAMPLES / "model_tiny.json"),
                 "--seq-length", "64", *more])


def test_training_uses_the_index_created_beforehand(inputs: Path, monkeypatch, capsys):
    assert index(inputs) == 0
    out = capsys.readouterr().out
    assert "training: 2 samples" in out and "validation: 2 samples" in out
    (rows,) = (inputs / "media/.mm-index").glob("*.rows")
    made = rows.stat().st_mtime_ns
    assert index(inputs, "--again") == 0 and rows.stat().st_mtime_ns > made
    run = load_run(["--mm-model", str(EXAMPLES / "model_tiny.json"), "--mm-data", str(inputs / "data.json"),
                    "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3", "--seq-length", "64",
                    "--log-dir", str(inputs / "logs")], 2, {})
    monkeypatch.delattr("mm.data.index.sample_files.make_index")
    assert check(run).samples.problems == []
    assert len(Dataset(run.data, gauge=Gauge.from_config(run.data, run.model, 64), seed=run.args.seed)) == 2


def test_index_of_bad_samples(inputs: Path, capsys):
    (inputs / "llava.json").write_text(json.dumps([*LLAVA, LLAVA[0]]))
    assert index(inputs) == 2
    reported = capsys.readouterr()
    problem = f"{inputs}/llava.json:1: record 1 (counted from 0, id '2'): image 'lost.png'"
    assert reported.out == "" and reported.err.startswith(f"error: {problem}")
    assert index(inputs, "--bad-sample", "skip") == 0
    out = capsys.readouterr().out
    assert "training: 1 sample" in out and f"note: left out: {problem}" in out
