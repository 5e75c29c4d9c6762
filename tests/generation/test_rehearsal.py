"""``--check`` of ``mm.generate`` and ``mm.evaluate``: all errors together, without launcher, device and megatron."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from demo.tiny_checkpoint import build
from mm.evaluate import main as evaluate
from mm.generate import main as generate
from mm.generation.rehearsal import ALL_IN_ORDER

TWO_RANKS = ("--check", "--world-size", "2", "--tensor-model-parallel-size", "2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a picture, and files of prompts and questions, each good or with one bad record."""
    directory = tmp_path_factory.mktemp("rehearsal")
    build(directory / "hf", ["What is in it? Red.", "Two and three and four? They are of no use here."], seed=0)
    Image.new("RGB", (56, 56), "red").save(directory / "red.png")
    prompts = [{"prompt": "What is in it?", "image": "red.png"}, {"prompt": "What is in it?", "image": "blue.png"}]
    questions = [{"question": "What is it?", "image": one["image"], "answer": "red"} for one in prompts]
    for name, records in (("prompts", prompts), ("questions", questions)):
        (directory / f"{name}.json").write_text(json.dumps(records[:1]))
        (directory / f"bad_{name}.json").write_text(json.dumps(records))
    return directory


def test_prompts_are_checked_without_weights(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load, output = ("--load", str(root / "hf"), *TWO_RANKS), ("--output", str(root / "answers" / "all.jsonl"))
    assert generate([*load, "--prompts", str(root / "prompts.json"), *output, "--sequence-parallel"]) == 0
    said = capsys.readouterr()
    assert said.out == "" and said.err.endswith(f"{ALL_IN_ORDER}\n") and "note: --sequence-parallel" in said.err
    wrong = ("--prompts", str(root / "bad_prompts.json"), "--output", str(root / "red.png" / "all.jsonl"))
    assert generate([*load, *wrong, "--stop-tokens", "<|im_ende|>", "--pipeline-model-parallel-size", "1"]) == 2
    reported = capsys.readouterr().err
    assert reported.count("error: ") == 3 and "blue.png" in reported and "--stop-tokens has '<|im_ende|>'" in reported
    assert "red.png is a file; give a directory" in reported and ALL_IN_ORDER not in reported
    assert generate([*load, "--world-size", "3", "--prompt", "What?", "--image", str(root / "blue.png")]) == 2
    reported = capsys.readouterr().err
    assert "The number of ranks is 3, not a multiple" in reported and "blue.png" in reported
    assert not (root / "answers").exists()


def test_questions_are_checked_without_weights(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--load", str(root / "hf"), *TWO_RANKS, "--rule", "exact", "--output", str(root / "scores"))
    assert evaluate([*asked, "--questions", str(root / "questions.json")]) == 0
    assert capsys.readouterr().out == f"{ALL_IN_ORDER}\n"
    assert evaluate([*asked, "--questions", str(root / "bad_questions.json")]) == 2
    said = capsys.readouterr()
    assert "blue.png" in said.err and said.out == "" and not (root / "scores").exists()


def test_media_are_checked_up_to_their_headers(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the help states: pixels after a good header are only decoded when they are used, and for --image."""
    Image.effect_noise((112, 112), 50).save(root / "whole.png")
    content = (root / "whole.png").read_bytes()
    for name, kept in (("half.png", content[: len(content) // 2]), ("head.png", content[:20]), ("none.png", b""),
                       ("text.mp4", b"hello")):
        (root / name).write_bytes(kept)
    names = ("half.png", "head.png", "none.png", "text.mp4", "gone.png")
    records = [{"prompt": "What?", "video" if name.endswith("mp4") else "image": name} for name in names]
    (root / "media.json").write_text(json.dumps(records))
    load = ("--load", str(root / "hf"), *TWO_RANKS)
    output = ("--output", str(root / "media.jsonl"))
    assert generate([*load, "--prompts", str(root / "media.json"), *output]) == 2
    reported = capsys.readouterr().err
    assert [name for name in names if name in reported] == list(names[1:]) and reported.count("error: ") == 4
    assert generate([*load, "--prompt", "What?", "--image", str(root / "half.png")]) == 2
    assert "half.png" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert generate([*load, "--prompt", "What?", "--device", "cuda"]) == 2
        assert "--device cuda: torch finds no CUDA device" in capsys.readouterr().err


def test_a_rehearsal_imports_no_megatron(root: Path) -> None:
    argv = ["--load", str(root / "hf"), "--prompt", "What?", "--check"]
    code = (f"import sys; from mm.generate import main; assert main({argv!r}) == 0; "
            f"assert not [name for name in sys.modules if name.startswith('megatron')]")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
