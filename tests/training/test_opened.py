"""Between the command and the first step, a process opens each file that its run reads once."""

import json
import os
from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.tiny_inputs import flags_of, run, write_inputs

NUM_RANKS = 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a run, the index of its samples, and its checkpoint after one step."""
    directory = write_inputs(tmp_path_factory.mktemp("opened"))
    data = json.loads((directory / "data.json").read_text())
    data["dataset_param"]["basic_parameters"]["val_rate"] = 0.3
    # without a stated rule, the check also computes picture sizes with the other rule
    data["dataset_param"]["preprocess_parameters"]["image_resize"] = "transformers"
    (directory / "data.json").write_text(json.dumps(data))
    # the index keeps no checksum of a file that was modified in the last seconds, and would read it again
    os.utime(directory / "samples.json", (1, 1))
    run(directory, "first", 1, "--load", str(directory / "hf"), "--exit-interval", "1", num_ranks=NUM_RANKS)
    return directory


def opened(inputs: Path, name: str, *flags: str) -> list[dict[str, dict[str, int]]]:
    """What each rank of a run has opened, by file."""
    words = flags_of(inputs, name, 1, "--num-workers", "0", "--exit-interval", "1", *flags)
    run_ranks(NUM_RANKS, "tests.training.opens_worker", str(inputs), *words)
    return [json.loads((inputs / f"opens_{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def of_data(found: dict[str, int]) -> dict[str, int]:
    """How often the records and the files of their index were opened for reading."""
    return {name: count for name, count in found.items() if name == "samples.json" or (
        name.startswith(".mm-index/") and not name.endswith(".lock"))}


def test_a_start_from_a_model_opens_each_file_once_on_every_rank(inputs: Path) -> None:
    """Rank 0 has checked the files before; both ranks own data."""
    for found in opened(inputs, "from_hf", "--load", str(inputs / "hf"), "--eval-interval", "1"):
        of_run, of_encoder = found["run"], found["encoder"]
        assert of_run["model_1.json"] == of_run["data.json"] == of_run["hf/model.safetensors"] == 1
        data = of_data(of_run)
        # index, numbers of the samples of each part (JSON and rows of all three), and the checksum of the records
        assert data["samples.json"] == 1 and len(data) == 8 and set(data.values()) == {1}
        of_processor = {name: count for name, count in of_run.items() if name in of_encoder}
        assert of_processor == {name: count + (name == "hf/config.json") for name, count in of_encoder.items()}
        assert {"hf/tokenizer.json", "hf/preprocessor_config.json", "hf/config.json"} <= of_encoder.keys()


def test_a_run_that_goes_on_opens_its_checkpoint_once_on_every_rank(inputs: Path) -> None:
    """Two stages: only the first owns data."""
    flags = "--load", str(inputs / "first/save"), "--mm-model", str(inputs / "model_2.json"), "--no-load-rng"
    first, second = (found["run"] for found in opened(inputs, "goes_on", *flags))
    checkpoint = "first/save/iter_0000001"
    for found in (first, second):
        assert found["model_2.json"] == found["data.json"] == found[f"{checkpoint}/manifest.json"] == 1
        assert {name for name in found if name.startswith(f"{checkpoint}/") and found[name] > 1} == set()
        assert any(name.startswith(f"{checkpoint}/weights_") for name in found)
    assert set(of_data(first).values()) == {1} and of_data(second) == {}
    assert not any(name.startswith(("hf/tokenizer", "hf/preprocessor")) for name in second)
