"""A model in training answers like its checkpoint in ``mm.evaluate``, and the training is unchanged."""

import json
from pathlib import Path

import pytest

from tests.files import json_lines
from tests.generation.commands import run_commands
from tests.launch import run_ranks
from tests.scoring.tables import encoded, write_table
from tests.tiny_inputs import short_flags, write_inputs

OWN = ("rule", "anls", "samples.json")
"""Ten questions in two batches, shared by two replicas."""
TABLE = ("benchmark", "docvqa", "docvqa.tsv")
LORA = ("--lora-target-modules", "all-linear", "--lora-r", "4", "--lora-dropout", "0.1")
MOVING: dict[str, tuple[str, tuple[str, ...]]] = {  # model JSON, flags; trained with questions and without
    "dp2": ("model_1", ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")),
    "lora on chunks of pp2": ("model_chunks", LORA),
}
CASES: dict[str, tuple[str, tuple[str, str, str], tuple[str, ...]]] = {
    **{name: (model, OWN, flags) for name, (model, flags) in MOVING.items()},
    "tp2, whole encoder": ("model_whole", TABLE, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "cp2, weight shards": ("model_1", OWN, (
        "--page", "--context-parallel-size", "2", "--data-parallel-sharding-strategy", "optim_grads_params")),
}


def last_step(name: str) -> int:
    return 3 if name in MOVING else 1


def write_files(root: Path) -> None:
    write_inputs(root)
    model = json.loads((root / "model_1.json").read_text())
    (root / "model_whole.json").write_text(json.dumps(model | {"encoder_placement": "tensor_ranks"}))
    write_table(root / "docvqa.tsv", [
        {"index": str(number), "image": encoded(number), "question": f"How many pictures are in number {number}?",
         "answer": "There is 1 picture in it."} for number in range(3)])


def training(root: Path, name: str, model: str, num_steps: int, *flags: str) -> list[str]:
    return short_flags(root, name, model, "data", num_steps, "--global-batch-size", "4", "--lr", "5e-3",
                       "--save", str(root / name / "save"), *flags)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train every case, and evaluate its last checkpoint with ``mm.evaluate`` on one rank."""
    root = tmp_path_factory.mktemp("questions")
    write_files(root)
    runs, evaluations = {}, []
    for name, (model, (kind, rule, file), flags) in CASES.items():
        asks = ("--eval-generate-interval", "2", "--eval-generate-questions", str(root / file),
                f"--eval-generate-{kind}", rule, "--eval-generate-max-new-tokens", "8")
        runs[name] = training(root, name, model, last_step(name), *flags, *asks)
        evaluations.append({"program": "mm.evaluate", "argv": [
            "--load", str(root / name / "save"), "--model-name-or-path", str(root / "hf"), "--mm-data",
            str(root / "data.json"), "--device", "cpu", "--questions", str(root / file), f"--{kind}", rule,
            "--max-new-tokens", "8", "--output", str(root / name / "evaluated")]})
    for name, (model, flags) in MOVING.items():
        runs[f"{name}, without"] = training(root, f"{name}, without", model, last_step(name), *flags)
    (root / "cases.json").write_text(json.dumps({
        name: {"num_ranks": 2, "runs": [argv]} for name, argv in runs.items()}))
    run_ranks(2, "tests.run.validation_worker", str(root))
    for name, done in zip(CASES, run_commands(evaluations), strict=True):
        assert done["status"] == 0, (name, done["err"])
    return root


@pytest.fixture(scope="module")
def results(root: Path) -> dict[str, dict]:
    return json.loads((root / "results.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_answers_equal_the_checkpoints(root: Path, results: dict, name: str) -> None:
    folder = root / name / "answers" / f"iter_{last_step(name):07d}"
    assert sorted(path.name for path in folder.iterdir()) == ["predictions.jsonl", "scores.json"]
    for file in ("predictions.jsonl", "scores.json"):
        assert (folder / file).read_bytes() == (root / name / "evaluated" / file).read_bytes(), file
    predictions = json_lines(folder / "predictions.jsonl")
    assert len(predictions) == (3 if name.startswith("tp2") else 10) and any(one["prediction"] for one in predictions)
    scores = json.loads((folder / "scores.json").read_text())
    rows = [row for row in results[name]["rows"] if "validation_score_percent" in row]
    assert [row["iteration"] for row in rows] == ([2, 3] if name in MOVING else [1])
    assert rows[-1]["validation_score_percent"] == scores["overall"]["score_percent"]
    assert rows[-1]["num_questions"] == len(predictions)
    assert rows[-1]["num_truncated_answers"] == scores["num_truncated_answers"]


def test_the_page_shows_the_answers_with_their_images(root: Path) -> None:
    html = (root / "cp2, weight shards" / "run.html").read_text()
    for words in ("Answers after step 1, the worst first", "Scored answers (1)", "ended at ",
                  "How many pictures are in sample number 2?", "Peak memory of the stages"):
        assert words in html, words
    assert html.count("data:image/jpeg;base64,") > 3


@pytest.mark.parametrize("name", MOVING)
def test_the_training_is_bit_equal(root: Path, results: dict, name: str) -> None:
    found, without = results[name], results[f"{name}, without"]
    steps = [[row for row in result["rows"] if "loss" in row] for result in (found, without)]
    for key in ("loss", "grad_norm", "num_tokens", "consumed_samples"):
        assert [row[key] for row in steps[0]] == [row[key] for row in steps[1]], key
    assert len({row["loss"] for row in steps[0]}) == 3
    assert found["states"] == without["states"]
    saved = [sorted((root / one / "save" / "iter_0000003").glob("*.safetensors")) for one in (name, f"{name}, without")]
    assert [path.name for path in saved[0]] == [path.name for path in saved[1]]
    assert any(path.name.startswith("optimizer") for path in saved[0])
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(*saved, strict=True))
