"""The settings of an evaluation: precedence of flags over the peer's JSON, published sizes, and all rules."""

import json
from pathlib import Path
from typing import Any

import pytest

from mm.config.evaluate import Evaluating, load_evaluating
from mm.config.generate import GenerationSettings
from mm.errors import UserError
from tests.scoring.tables import peer_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "AI2D_TEST.tsv").write_text("index\n")
    return tmp_path


def load(folder: Path, *flags: str, **peer: Any) -> Evaluating:
    """With the peer's JSON if any values for it are given."""
    if peer:
        value = peer_json(str(folder / "AI2D_TEST.tsv"), str(folder / "results"), str(folder)) | peer
        (folder / "evaluate.json").write_text(json.dumps(value))
        flags = (*flags, "--mm-model", str(folder / "evaluate.json"))
    return load_evaluating(["--load", str(folder), *flags], {})


def problems(folder: Path, *flags: str, **peer: Any) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        load(folder, *flags, **peer)
    return caught.value.problems


def test_flags_alone(folder):
    common = ("--questions", str(folder / "AI2D_TEST.tsv"), "--output", str(folder / "out"))
    found = load(folder, *common, "--benchmark", "ai2d")
    args = found.asking.args
    assert (found.benchmark, found.rule, found.custom_prompt, found.peer_model) == ("ai2d", None, False, None)
    assert (args.image_min_pixels, args.image_max_pixels) == (1280 * 28 * 28, 16384 * 28 * 28)
    checkpoint = GenerationSettings(do_sample=True, temperature=0.7, repetition_penalty=1.05, eos_token_id=(5,))
    decoding = found.asking.decoding(checkpoint)
    assert (decoding.temperature, decoding.repetition_penalty, decoding.max_new_tokens) == (0.0, 1.0, 2048)
    assert decoding.stop_token_ids == (5,)
    own = load(folder, *common, "--rule", "anls", "--evaluation-model", "mine")
    assert (own.benchmark, own.rule, own.asking.args.image_min_pixels) == (None, "anls", None)
    assert (own.peer_model, own.peer_dataset) == ("mine", "AI2D_TEST")
    assert own.asking.decoding(checkpoint).max_new_tokens == 512
    smaller = load(folder, *common, "--benchmark", "ai2d", "--image-max-pixels", "3136")
    assert smaller.asking.args.image_min_pixels is None


def test_flags_take_precedence_over_the_peers_json(folder):
    found = load(folder, evaluation_dataset="AI2D_TEST")
    assert (found.benchmark, found.custom_prompt, found.peer_model) == ("ai2d", True, "qwen2_vl_7b")
    assert (found.output, found.peer_dataset) == (str(folder / "results"), "ai2d_test")
    assert found.asking.args.image_min_pixels is None  # the JSON's own bounds count
    assert found.asking.notes[-1].startswith("an option letter counts only in the last four words")
    assert not load(folder, use_custom_prompt=False).custom_prompt
    assert load(folder, "--benchmark", "mmmu", "--output", "elsewhere", evaluation_dataset="none").output == "elsewhere"


def test_missing_or_wrong_settings(folder):
    assert problems(folder) == (
        "--benchmark or --rule is missing: name the benchmark of the questions, or the scoring rule for your own",
        "--questions is missing: the TSV file of the benchmark, or your own JSON file",
        "--output is missing: the directory of predictions and scores")
    assert problems(folder, "--benchmark", "mmmu", "--rule", "exact", "--questions", "none.tsv", "--output",
                    str(folder / "AI2D_TEST.tsv")) == (
        "--benchmark and --rule are both given; keep one",
        "--questions is 'none.tsv', which is not a file",
        f"--output is '{folder}/AI2D_TEST.tsv', which is a file; give a directory")
    assert problems(folder, evaluation_dataset="mmmu_val") == (
        f"{folder}/evaluate.json: evaluation_dataset is 'mmmu_val' (did you mean 'mmmu_dev_val'?); expected one of "
        "ai2d_test, chartqa_test, docvqa_val, mmmu_dev_val",)
    for name in ("../../../x", "a/b", "a\nb", "x" * 101):
        expected = (f"is {name!r}, which cannot start file names in --output; give printable text of at most "
                    f"100 bytes without '/'")
        common = ("--rule", "exact", "--questions", str(folder / "AI2D_TEST.tsv"), "--output", str(folder / "out"))
        assert problems(folder, *common, "--evaluation-model", name) == (f"--evaluation-model {expected}",)
        assert problems(folder, evaluation_model=name) == (f"{folder}/evaluate.json: evaluation_model {expected}",)
    assert problems(folder, "--benchmark", "ai2")[0] == (
        "--benchmark is 'ai2'; expected one of ai2d, chartqa, docvqa, mmmu (did you mean 'ai2d'?)")
