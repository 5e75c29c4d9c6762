"""Prompts of files and of the command line."""

import json
from pathlib import Path

import pytest

from mm.data.sample import Image, Turn, Video
from mm.errors import UserError
from mm.generation.answers import by_length
from mm.generation.prompts import question, read_prompts
from tests.data.oracle import photo


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    photo(40, 30).save(tmp_path / "a.png")
    photo(40, 30).save(tmp_path / "b.png")
    (tmp_path / "c.mp4").write_bytes(b"not looked at here")
    return tmp_path


def prompts_of(folder: Path, records: list, name: str = "p.jsonl") -> tuple[list, list[str]]:
    text = json.dumps(records, indent=1) if name.endswith(".json") else "".join(json.dumps(r) + "\n" for r in records)
    (folder / name).write_text(text)
    return read_prompts(str(folder / name), ())


@pytest.mark.parametrize("name", ["p.json", "p.jsonl"])
def test_every_form_is_read(folder: Path, name: str):
    here = str(folder)
    a, b, c = Image(f"{here}/a.png"), Image(f"{here}/b.png"), Video(f"{here}/c.mp4")
    records_and_turns = [
        ({"prompt": "Hi?"}, (Turn("user", ("Hi?",)),)),
        ({"prompt": "What?", "image": "a.png", "id": "x"}, (Turn("user", (a, "What?")),)),
        ({"prompt": "Is <image> like <image>?", "images": ["a.png", "b.png"]},
         (Turn("user", ("Is ", a, " like ", b, "?")),)),
        ({"prompt": "Both.", "images": ["b.png"], "videos": "c.mp4", "system": "Be short."},
         (Turn("system", ("Be short.",)), Turn("user", (b, c, "Both.")))),
        ({"messages": [{"role": "user", "content": "<image>A?"}, {"role": "assistant", "content": "B."},
                       {"role": "user", "content": "C?"}], "images": ["a.png"]},
         (Turn("user", (a, "A?")), Turn("assistant", ("B.",)), Turn("user", ("C?",)))),
        ({"conversations": [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "known"}]},
         (Turn("user", ("A?",)),)),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"},
                                                    {"type": "text", "text": "D"}]}]}, (Turn("user", (a, "D")),)),
        ({"instruction": "E", "input": "F"}, (Turn("user", ("E\nF",)),)),
    ]
    prompts, problems = prompts_of(folder, [record for record, _ in records_and_turns], name)
    assert problems == []
    assert [prompt.sample.turns for prompt in prompts] == [turns for _, turns in records_and_turns]
    assert [prompt.number for prompt in prompts] == list(range(len(prompts)))
    assert (prompts[1].name, prompts[1].question) == ("x", "<image>What?")
    assert len({prompt.digest for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize(("record", "what"), [
    ({"prompt": "A", "image": "none.png"}, "prompt 1 (counted from 0) image 'none.png' is not a regular file"),
    ({"prompt": "A", "image": "/etc/passwd"}, "to allow that folder, add it to --media-roots"),
    ({"prompt": "A <image>"}, "has 1 <image> in its messages but 0 images"),
    ({"prompt": "  "}, "has an empty message 0"),
    ({"messages": [{"role": "assistant", "content": "A"}]}, "there is nothing to answer"),
    ({"question": "A"}, "has no 'conversations'"),
    ([1], "is a list; expected an object"),
])
def test_a_bad_record_is_reported_and_the_others_are_read(folder: Path, record, what: str):
    prompts, problems = prompts_of(folder, [{"prompt": "Good"}, record, {"prompt": "Good too"}])
    assert [prompt.number for prompt in prompts] == [0, 2]
    assert len(problems) == 1 and what in problems[0]
    assert problems[0].startswith(f"{folder / 'p.jsonl'}:2: prompt 1 (counted from 0) ")


def test_broken_lines_and_empty_files(folder: Path):
    (folder / "p.jsonl").write_text('{"prompt": "A"}\n{"prompt": \n{"prompt": "B"}\n')
    prompts, problems = read_prompts(str(folder / "p.jsonl"), ())
    assert [prompt.number for prompt in prompts] == [0, 2]
    assert "not valid JSON" in problems[0]
    (folder / "p.jsonl").write_text("")
    with pytest.raises(UserError, match="has no prompts"):
        read_prompts(str(folder / "p.jsonl"), ())


def test_a_question_of_the_user(folder: Path):
    a, b, c = (str(folder / name) for name in ("a.png", "b.png", "c.mp4"))
    assert question("What?", [a, b], [c]) == Turn("user", (Image(a), Image(b), Video(c), "What?"))
    assert question("What?", [a], [], media_last=True) == Turn("user", ("What?", Image(a)))
    assert question("In <image>?", [a], [c], media_last=True) == Turn("user", ("In ", Image(a), "?", Video(c)))
    assert question("", [a], []) == Turn("user", (Image(a),))


@pytest.mark.parametrize(("text", "images", "what"), [
    ("A", ["none.png"], "image 'none.png' is not a regular file"),
    ("<image><image>", ["a.png"], "2 <image> but 1 image;"),
    (" ", [], "the question is empty"),
])
def test_a_question_that_cannot_be_asked(folder: Path, monkeypatch, text: str, images: list[str], what: str):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=what):
        question(text, images, [])


def test_batches_have_similar_lengths():
    assert by_length([5, 9, 1, 9, 7], 2) == [[1, 3], [4, 0], [2]]
