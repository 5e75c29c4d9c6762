"""A small run for tests of the preflight."""

import json
from pathlib import Path

from demo.tiny_checkpoint import build
from mm.config.run import load_run
from mm.run.preflight import check
from tests.tiny_inputs import write_data, write_model


def make_inputs(tmp_path: Path) -> Path:
    """A checkpoint, one sample without pictures, and JSON files for one stage."""
    samples = [{"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]}]
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    build(tmp_path / "hf", ["One? 1", "Two and three and four? They are of no use here."], seed=0)
    write_data(tmp_path, tmp_path / "samples.json")
    write_model(tmp_path, "1")
    return tmp_path


def flags(inputs: Path, *more: str) -> list[str]:
    return ["--mm-model", str(inputs / "model_1.json"), "--mm-data", str(inputs / "data.json"),
            "--micro-batch-size", "1", "--seq-length", "64", "--train-iters", "1", "--lr", "1e-3",
            "--log-dir", str(inputs / "logs"), *more]


def problems(inputs: Path, *more: str) -> list[str]:
    checked = check(load_run(flags(inputs, *more), environment={}))
    return checked.problems


def set_preprocessing(inputs: Path, **keys: object) -> None:
    """Keys of the data JSON's preprocess_parameters."""
    data = json.loads((inputs / "data.json").read_text())
    data["dataset_param"]["preprocess_parameters"] |= keys
    (inputs / "data.json").write_text(json.dumps(data))
