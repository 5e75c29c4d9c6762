"""``mm.evaluate`` as a user calls it: all benchmarks, a killed run, other numbers of ranks, the peer's JSON, errors."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from mm.scoring.benchmarks import listed
from mm.scoring.rules import score
from tests.files import json_lines
from tests.generation.commands import run_commands
from tests.launch import run_ranks
from tests.scoring.tables import encoded, peer_json, write_table
from tests.scoring.test_results import ROWS
from tests.tiny_inputs import write_inputs

SIZES = ("--image-min-pixels", "784", "--image-max-pixels", "3136")
FILES = ["answers.jsonl", "predictions.jsonl", "report.html", "scores.json", "settings.json"]


def write_questions(root: Path) -> None:
    """A TSV file of each benchmark, and own questions with the same pictures as files."""
    for name, rows in ROWS.items():
        first = {"index": "", "image": "", "question": "", "A": "", "B": ""} if name == "mmmu" else {}
        write_table(root / f"{name}.tsv", [
            {**first, "image": encoded(number), "question": f"What is in number {number}?", **row}
            for number, row in enumerate(rows)])
    good = {"index": "0", "image": encoded(0), "question": "What?", "answer": "x"}
    cut = base64.b64encode(base64.b64decode(encoded(1))[:1000]).decode()
    write_table(root / "no_columns.tsv", [{"index": "0", "image": encoded(0), "text": "What?", "answer": "x"}])
    write_table(root / "cut.tsv", [good, {**good, "index": "1", "image": cut}])
    write_table(root / "mended.tsv", [good, {**good, "index": "1", "image": encoded(1)}])
    asked = [{"question": f"What is in number {number}?", "image": "1_0.png", "answer": "x"} for number in range(3)]
    (root / "own.json").write_text(json.dumps(asked))
    (root / "missing.json").write_text(json.dumps([*asked, {"question": "What?", "image": "none.png", "answer": "x"}]))
    (root / "prompts.json").write_text(json.dumps([
        {"prompt": one["question"], "image": one["image"]} for one in asked]))
    peer = peer_json(str(root / "ai2d.tsv"), str(root / "peer"), str(root / "hf"))
    (root / "evaluate.json").write_text(json.dumps(peer))


def evaluation(root: Path, questions: str, output: str, *flags: str) -> list[str]:
    return ["--load", str(root / "hf"), "--device", "cpu", "--max-new-tokens", "6", "--batch-size", "2", *SIZES,
            "--questions", str(root / questions), "--output", str(root / output), *flags]


def commands(root: Path) -> dict[str, dict[str, Any]]:
    """Results by name, in order."""
    own = evaluation(root, "own.json", "own", "--rule", "exact")
    unfinished = evaluation(root, "chartqa.tsv", "unfinished", "--benchmark", "chartqa")
    cut = evaluation(root, "changing.tsv", "changing", "--benchmark", "docvqa")
    argvs = {
        **{name: evaluation(root, f"{name}.tsv", name, "--benchmark", name) for name in ROWS},
        "own": own, "unfinished": unfinished, "cut": cut,
        "peer": ["--load", str(root / "hf"), "--device", "cpu", "--max-new-tokens", "6", "--mm-model",
                 str(root / "evaluate.json"), "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size",
                 "1", "--seq-length", "1024", "--vocab-size", "152064", "--variable-seq-lengths", "--micro-batch-size",
                 "1"],
    }
    asked = {name: {"program": "mm.evaluate", "argv": argv} for name, argv in argvs.items()}
    asked["unfinished"] |= {"kill_after": 1}
    asked["generated"] = {"argv": [
        "--load", str(root / "hf"), "--device", "cpu", "--max-new-tokens", "6", "--greedy", "--repetition-penalty", "1",
        *SIZES, "--batch-size", "2", "--prompts", str(root / "prompts.json"), "--output", str(root / "own.jsonl")]}
    return asked


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_inputs(tmp_path_factory.mktemp("evaluate"))
    write_questions(directory)
    (directory / "changing.tsv").write_bytes((directory / "cut.tsv").read_bytes())
    return directory


@pytest.fixture(scope="module")
def done(root: Path) -> dict[str, dict[str, Any]]:
    asked = commands(root)
    return dict(zip(asked, run_commands(list(asked.values())), strict=True))


@pytest.mark.parametrize("name", ROWS)
def test_each_benchmark(root, done, name):
    assert done[name]["status"] == 0, done[name]["err"]
    assert sorted(path.name for path in (root / name).iterdir()) == FILES
    found, scores = json_lines(root / name / "predictions.jsonl"), json.loads((root / name / "scores.json").read_text())
    assert [one["index"] for one in found] == [row["index"] for row in ROWS[name]]
    for one, row in zip(found, ROWS[name], strict=True):
        right, options = listed(row["answer"]), one.get("options", {})
        assert one["right"] == list(right) and one["score"] == score(scores["rule"], one["prediction"], right, options)
    mean = 100 * sum(one["score"] for one in found) / len(found)
    assert scores["overall"]["score_percent"] == pytest.approx(mean, abs=1e-4)
    assert f"{scores['headline']['score_percent']:.2f}%" in done[name]["out"]
    assert len({one["prediction"] for one in found}) > 1, "the model sees the pictures"


def test_answers_are_those_of_mm_generate(root, done):
    assert done["own"]["status"] == done["generated"]["status"] == 0
    assert [one["prediction"] for one in json_lines(root / "own/predictions.jsonl")] == [
        one["answer"] for one in json_lines(root / "own.jsonl")]


def test_several_ranks_finish_what_one_has_begun_with_the_same_files(root, done):
    """Three ranks, for at most two batches that are left."""
    assert done["chartqa"]["status"] == 0 and done["unfinished"]["status"] < 0
    before = (root / "unfinished/answers.jsonl").read_bytes()
    assert 0 < before.count(b"\n") < len(ROWS["chartqa"])
    run_ranks(3, "mm.evaluate", *evaluation(root, "chartqa.tsv", "unfinished", "--benchmark", "chartqa"))
    assert sorted(path.name for path in (root / "unfinished").iterdir()) == FILES
    for name in FILES:
        assert (root / "unfinished" / name).read_bytes() == (root / "chartqa" / name).read_bytes(), name


def test_the_peers_json(root, done):
    found = done["peer"]
    assert found["status"] == 0, found["err"]
    names = [f"qwen2_vl_7b_ai2d_test{end}" for end in (".xlsx", "_PREV.json", "_acc.csv", "_acc.xlsx")]
    assert sorted(path.name for path in (root / "peer").iterdir()) == [*FILES[:2], *names, *FILES[2:]]
    settings = json.loads((root / "peer/settings.json").read_text())
    assert settings["use_custom_prompt"] and settings["benchmark"] == "ai2d"
    assert settings["decoding"]["repetition_penalty"] != 2 and settings["media"]["image_min_pixels"] == 784
    assert "no effect: " in found["err"]


def test_bad_questions_are_reported_and_results_are_kept(root, done):
    assert done["docvqa"]["status"] == done["own"]["status"] == 0
    kept = {path: path.read_bytes() for name in ("docvqa", "own") for path in (root / name).iterdir()}
    argvs = {
        "no_columns.tsv": evaluation(root, "no_columns.tsv", "docvqa", "--benchmark", "docvqa"),
        "missing": evaluation(root, "missing.json", "own", "--rule", "exact"),
        "no rule": evaluation(root, "own.json", "own")}
    bad = dict(zip(argvs, run_commands([
        {"program": "mm.evaluate", "argv": argv} for argv in argvs.values()]), strict=True))
    for name, expected in (
        ("no_columns.tsv", f"error: {root}/no_columns.tsv:1: has no column 'question'; its columns are 'index', "
                           f"'image', 'text', 'answer', separated by tabs.\n"),
        ("missing", f"error: {root}/missing.json:1: question 3 (counted from 0): image 'none.png' "
                    f"is not a regular file, neither as"),
        ("no rule", "error: --benchmark or --rule is missing: name the benchmark of the questions"),
    ):
        assert bad[name]["status"] == 2 and bad[name]["err"].startswith(expected), (name, bad[name]["err"])
    assert {path: path.read_bytes() for name in ("docvqa", "own") for path in (root / name).iterdir()} == kept
    assert sorted(path.name for path in kept) == sorted(2 * FILES)


def test_a_truncated_picture_can_be_replaced(root, done):
    found = done["cut"]
    assert found["status"] == 2 and f"{root}/changing.tsv:3" in found["err"] and "damaged or truncated" in found["err"]
    assert [one["number"] for one in json_lines(root / "changing/answers.jsonl")] == [0]
    before = (root / "changing/answers.jsonl").read_bytes()
    (root / "changing.tsv").write_bytes((root / "mended.tsv").read_bytes())
    (again,) = run_commands([{"program": "mm.evaluate", "argv": commands(root)["cut"]["argv"]}])
    assert again["status"] == 0, again["err"]
    assert (root / "changing/answers.jsonl").read_bytes().startswith(before)
    assert len(json_lines(root / "changing/predictions.jsonl")) == 2
