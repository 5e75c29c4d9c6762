"""``mm-data check`` keeps the index that training uses; ``index`` and ``stats`` are other names of it."""

import json
from pathlib import Path

import pytest

from demo.tiny_checkpoint import build
from mm.config.run import load_run
from mm.data.index.dataset import Dataset
from mm.data.index.measure import Measure
from mm.data_tool.cli import main
from mm.run.preflight import check
from tests.data.oracle import photo
from tests.files import EXAMPLES
from tests.tiny_inputs import write_data

LLAVA = {"id": "1", "image": "1.png", "conversations": [{"from": "human", "value": "<image>?"},
                                                        {"from": "gpt", "value": "猫"}]}


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    (tmp_path / "media").mkdir()
    photo(60, 60).save(tmp_path / "media/1.png")
    (tmp_path / "llava.json").write_text(json.dumps([LLAVA] * 4))
    build(tmp_path / "hf", ["One? 1", "Two and three and four? They are of no use here."], seed=0)
    write_data(tmp_path, tmp_path / "llava.json", dataset_dir=str(tmp_path / "media"), val_rate=0.5)
    return tmp_path


def test_training_uses_the_index_created_beforehand(inputs: Path, monkeypatch, capsys):
    def check_data(name: str, *more: str) -> int:
        return main([name, "--mm-data", str(inputs / "data.json"), "--mm-model", str(EXAMPLES / "model_tiny.json"),
                     "--seq-length", "64", *more])

    assert check_data("index") == 0
    out = capsys.readouterr().out
    assert "Training samples" in out and "Validation samples" in out
    (rows,) = (inputs / "media/.mm-index").glob("*.rows")
    made = rows.stat().st_mtime_ns
    assert check_data("stats") == 0 and rows.stat().st_mtime_ns == made
    assert check_data("check", "--again") == 0 and rows.stat().st_mtime_ns > made
    run = load_run(["--mm-model", str(EXAMPLES / "model_tiny.json"), "--mm-data", str(inputs / "data.json"),
                    "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3", "--seq-length", "64",
                    "--log-dir", str(inputs / "logs")], 2, {})
    monkeypatch.delattr("mm.data.index.dataset.make_index")
    assert check(run).problems == []
    assert len(Dataset(run.data, measure=Measure.from_config(run.data, run.model, 64), seed=run.args.seed)) == 2
