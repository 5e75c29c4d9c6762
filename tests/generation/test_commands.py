"""``mm.generate`` as a user calls it: one question, a conversation, a file that is killed and restarted, and errors."""

import json
import re
from pathlib import Path

import pytest

from mm.config.generate import load_asking
from mm.data.encode import SampleEncoder
from mm.errors import UserError
from mm.generation.prompts import read_prompts
from mm.generation.setup import find
from tests.data.oracle import photo
from tests.files import json_lines
from tests.generation.commands import run_commands
from tests.generation.questions import Reference, encoder_of
from tests.launch import run_ranks
from tests.tiny_inputs import write_inputs

NUM_PROMPTS, GOOD = 12, [number for number in range(12) if number not in (3, 7)]
NUM_TOKENS = 6
SHORT = ("--device", "cpu", "--max-new-tokens", str(NUM_TOKENS))


def write_prompts(directory: Path) -> None:
    """Two of them cannot be asked: one picture is missing, another is truncated."""
    photo(84, 56, seed=1).save(directory / "wide.png")
    photo(84, 84, seed=2).save(directory / "cut.png")
    content = (directory / "cut.png").read_bytes()
    (directory / "cut.png").write_bytes(content[: len(content) // 2])
    records = [{"prompt": f"What is in it, {number}?" + " there" * (number % 5), "image": "wide.png"}
               for number in range(NUM_PROMPTS)]
    records[3]["image"] = "missing.png"
    records[7]["image"] = "cut.png"
    (directory / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def commands(root: Path, stop_word: str) -> dict[str, dict]:
    """Results by name, in order."""
    load = ["--load", str(root / "hf"), *SHORT]
    wide, prompts = str(root / "wide.png"), ["--prompts", str(root / "prompts.jsonl"), "--batch-size", "2"]
    talk = (f"/image {wide}\nWhat is this?\n\nAnd now?\n/image none.png\nWhat?\n/image x\n/clear\nWhat is this?\n"
            f"/exit\nno\n")
    return {
        "one": {"argv": [*load, "--prompt", "What is this?", "--image", wide]},
        "drawn": {"argv": [*load, "--prompt", "What?", "--temperature", "1.5", "--seed", "3", "--stop-tokens", "290"]},
        "half": {"argv": [*load, "--prompt", "What?", "--bf16", "--repetition-penalty", "1.2", "--system", "Be."]},
        "talk": {"argv": [*load, "--chat"], "typed": talk},
        "whole": {"argv": [*load, *prompts, "--output", str(root / "whole.jsonl")]},
        "stopped": {"argv": [*load, *prompts, "--output", str(root / "stopped.jsonl"), "--stop-tokens", stop_word]},
        "killed": {"argv": [*load, *prompts, "--output", str(root / "b.jsonl")], "kill_after": 4},
        "started again": {"argv": [*load, *prompts, "--output", str(root / "b.jsonl")]},
        "other settings": {"argv": [*load, *prompts, "--output", str(root / "b.jsonl"), "--temperature", "1"]},
        "no picture": {"argv": [*load, "--prompt", "What?", "--image", "none.png"]},
        "no token": {"argv": [*load, "--prompt", "What?", "--stop-tokens", "<|im_ende|>"]},
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mm.checkpoint import convert
    from mm.checkpoint.mindspeed_layout import Layout

    directory = write_inputs(tmp_path_factory.mktemp("commands"))
    write_prompts(directory)
    convert.hf_to_mm(directory / "hf", directory / "mm", Layout(((8,),), ((4,),), 1)).run(num_workers=1)
    other = json.loads((directory / "model_1.json").read_text())
    other["text_decoder"]["num_query_groups"] = 4
    (directory / "other.json").write_text(json.dumps(other))
    (directory / "beams").mkdir()
    for file in (directory / "hf").iterdir():
        (directory / "beams" / file.name).symlink_to(file)
    (directory / "beams" / "generation_config.json").unlink()
    (directory / "beams" / "generation_config.json").write_text('{"num_beams": 4}')
    return directory


@pytest.fixture(scope="module")
def encoder(root: Path) -> SampleEncoder:
    return encoder_of(root)


@pytest.fixture(scope="module")
def greedy(root: Path, encoder: SampleEncoder) -> dict[int, list[int]]:
    """transformers' tokens of each good prompt."""
    reference = Reference(root / "hf", encoder)
    prompts = [prompt for prompt in read_prompts(str(root / "prompts.jsonl"), ())[0] if prompt.number in GOOD]
    return {prompt.number: reference.answer(prompt)[0][:NUM_TOKENS] for prompt in prompts}


@pytest.fixture(scope="module")
def stop_token(greedy: dict[int, list[int]]) -> int:
    """In the middle of the first answer."""
    return greedy[0][2]


@pytest.fixture(scope="module")
def done(root: Path, encoder: SampleEncoder, stop_token: int) -> dict[str, dict]:
    asked = commands(root, encoder.chat.tokenizer.convert_ids_to_tokens(stop_token))
    found = run_commands(list(asked.values()))
    return dict(zip(asked, found, strict=True))


def test_one_question(done: dict):
    for name in ("one", "drawn", "half"):
        assert done[name]["status"] == 0, done[name]
        assert done[name]["out"].endswith("\n") and len(done[name]["out"]) > 1


def test_a_conversation(done: dict):
    """/clear also removes the picture."""
    talk = done["talk"]
    assert talk["status"] == 0, talk
    assert talk["out"].startswith(done["one"]["out"])
    assert talk["err"].count("error: ") == 1 and "image 'none.png' is not a regular file" in talk["err"]


def test_an_error_of_one_rank_ends_all(root: Path):
    """In the middle of an answer on two stages: no rank waits forever."""
    with pytest.raises(AssertionError, match="rank 1 failed with RuntimeError: no third token"):
        run_ranks(2, "tests.generation.failing_worker", "--load", str(root / "hf"), "--prompt", "What?", *SHORT,
                  "--pipeline-model-parallel-size", "2", timeout_seconds=240)


def test_a_file_of_prompts(done: dict, root: Path):
    answers = json_lines(root / "whole.jsonl")
    assert done["whole"]["status"] == 2
    assert [answer["number"] for answer in answers] == GOOD
    assert all(answer["answer"] and answer["question"].startswith("<image>What is in it") for answer in answers)
    assert {answer["ended"] for answer in answers} <= {"stop", "length"}
    errors = [line for line in done["whole"]["err"].splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert "prompts.jsonl:4: prompt 3 (counted from 0) image 'missing.png' is not a regular file" in errors[0]
    assert "prompts.jsonl:8" in errors[1] and "cut.png" in errors[1]


def test_a_stop_token_ends_answers(done: dict, root: Path, encoder: SampleEncoder, greedy: dict, stop_token: int):
    assert done["stopped"]["status"] == 2  # for the two that cannot be asked
    found = {one["number"]: one for one in json_lines(root / "stopped.jsonl")}
    assert found.keys() == greedy.keys()
    for number, ids in greedy.items():
        ended = "stop" if stop_token in ids else "length"
        shown = ids[: ids.index(stop_token) + 1] if stop_token in ids else ids
        assert (found[number]["ended"], found[number]["num_answer_tokens"]) == (ended, len(shown)), number
        assert found[number]["answer"] == encoder.chat.tokenizer.decode(shown, skip_special_tokens=True), number
    assert found[0]["ended"] == "stop" and 1 < found[0]["num_answer_tokens"] < NUM_TOKENS
    assert {one["ended"] for one in found.values()} == {"stop", "length"}


def test_killed_in_the_middle_and_started_again(done: dict, root: Path):
    """The same bytes as from an uninterrupted run."""
    assert done["killed"]["status"] == -9
    assert done["started again"]["status"] == 2
    kept = re.search(r"b\.jsonl already has (\d+) answers", done["started again"]["err"])
    assert kept and 4 <= int(kept[1]) < len(GOOD)
    assert (root / "b.jsonl").read_bytes() == (root / "whole.jsonl").read_bytes()


def test_answers_by_other_settings_are_not_mixed(done: dict):
    assert done["other settings"]["status"] == 2
    assert "or was made with other weights or settings" in done["other settings"]["err"]


@pytest.mark.parametrize(("name", "what"), [
    ("no picture", "image 'none.png' is not a regular file; give the path of an existing file"),
    ("no token", "--stop-tokens has '<|im_ende|>' (did you mean '<|im_end|>'?)"),
])
def test_errors_are_reported(done: dict, name: str, what: str):
    assert done[name]["status"] == 2, done[name]
    assert what in done[name]["err"]
    assert "Traceback" not in done[name]["err"] and done[name]["out"] == ""


@pytest.mark.parametrize(("load", "flags", "what"), [
    ("hf", ("--tensor-model-parallel-size", "2"), "The number of ranks is 1, not a multiple of tensor x pipeline para"),
    ("mm", (), "has no tokenizer; give --model-name-or-path"), ("hf", ("--mm-model", "other.json"), "num_query_groups"),
    ("beams", (), "num_beams is 4; supported: null or 1"),
])
def test_models_that_cannot_be_opened(root: Path, monkeypatch, load: str, flags: tuple[str, ...], what: str):
    monkeypatch.chdir(root)
    with pytest.raises(UserError, match=what):
        find(load_asking(["--load", load, "--prompt", "What?", *flags], {}))
