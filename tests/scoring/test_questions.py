"""The user's own questions: both formats, every rule, and records that cannot be asked."""

import json

import numpy as np
import pytest
from PIL import Image as Pillow

from mm.data.sample import Image
from mm.errors import UserError
from mm.scoring.questions import read_own


@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "b.png"):
        Pillow.fromarray(np.zeros((28, 28, 3), np.uint8)).save(tmp_path / name)
    return tmp_path


def read(folder, records, rule="exact", **settings):
    (folder / "own.json").write_text(json.dumps(records))
    return read_own(str(folder / "own.json"), rule, (), **settings)


def test_questions(folder):
    a, b = Image(str(folder / "a.png")), Image(str(folder / "b.png"))
    items = read(folder, [
        {"question": "How many?", "image": "a.png", "answer": 2, "category": "counting"},
        {"id": "x", "question": "<image> or <image>?", "images": ["a.png", "b.png"], "answers": ["one", "1"]},
        {"index": 7, "question": "1 + 1?", "answer": "", "conversations": "how it was made", "system": "Be."}]).items
    assert [item.content for item in items] == [(a, "How many?"), (a, " or ", b, "?"), ("1 + 1?",)]
    assert [item.right for item in items] == [("2",), ("one", "1"), ("",)]
    assert [[turn.text for turn in item.earlier] for item in items] == [[], [], ["Be."]]
    assert [item.index for item in items] == ["0", "x", "7"] and items[0].groups == {"category": "counting"}
    assert items[1].where == f"{folder}/own.json:1: question 1 (counted from 0, id 'x')"


def test_options(folder):
    asked = {"question": "Which?", "image": "a.png"}
    items = read(folder, [{**asked, "options": {"A": "sun", "B": "moon"}, "answer": "moon"},
                          {**asked, "options": ["sun", "moon", "both"], "answer": ["A", "both"]}], "choice").items
    text = "Question: Which?\nOptions:\nA. sun\nB. moon\nPlease select the correct answer from the options above. \n"
    assert items[0].content == (Image(str(folder / "a.png")), text)
    assert [item.right for item in items] == [("B",), ("A", "C")]


def test_samples_as_they_are_trained_on(folder):
    def turn(role, text):
        return {"role": role, "content": text}

    (item,) = read(folder, [{"messages": [
        turn("system", "Be short."), turn("user", "<image>Who?"), turn("assistant", "Me."), turn("user", "Why?"),
        turn("assistant", "So.")], "images": ["a.png"]}]).items
    assert [(one.role, one.text) for one in item.earlier] == [
        ("system", "Be short."), ("user", "<image>Who?"), ("assistant", "Me.")]
    assert item.content == ("Why?",) and item.right == ("So.",)


@pytest.mark.parametrize(("record", "rule", "expected"), [
    ([1], "exact", "is a list; expected an object with 'question' and 'answer'."),
    ({"question": " ", "answer": "1"}, "exact", "'question' is \" \"; expected a string."),
    ({"question": "q", "imag": "a.png", "answer": "1"}, "exact",
     "has 'imag', which nothing reads (did you mean 'image'?); rename or remove it."),
    ({"question": "q"}, "exact", "'answer' is null; expected a string, a number, or a list of these."),
    ({"question": "q", "answer": [True]}, "exact",
     "'answer' is [true]; expected a string, a number, or a list of these."),
    ({"question": "q", "answer": "A"}, "choice",
     "has no 'options'; the rule choice needs them, and no other rule reads them."),
    ({"question": "q", "answer": "A", "options": ["x", "y"]}, "anls",
     "has 'options'; the rule choice needs them, and no other rule reads them."),
    ({"question": "q", "answer": "A", "options": {"A": "x", "BC": "y"}}, "choice",
     "'options' is {\"A\": \"x\", \"BC\": \"y\"}; expected at least two texts, as a list or as an object with letters "
     'like {"A": "cat", "B": "dog"}.'),
    ({"question": "q", "answer": "C", "options": ["x", "y"]}, "choice",
     "'answer' is 'C'; expected the letter or the text of an option: A, B."),
])  # fmt: skip
def test_records_that_cannot_be_asked(folder, record, rule, expected):
    with pytest.raises(UserError) as caught:
        read(folder, [record], rule)
    assert caught.value.problems == (f"{folder}/own.json:1: question 0 (counted from 0): {expected}",)


def test_missing_images_double_indices_and_broken_lines(folder):
    fifth = '{"id": 5, "question": "q", "answer": 1}\n'
    (folder / "own.jsonl").write_text(
        '{"question": "q", "answer": "1", "image": "no.png"}\n{"question": \n' + 2 * fifth)
    with pytest.raises(UserError) as caught:
        read_own(str(folder / "own.jsonl"), "exact", ())
    missing, broken, double = caught.value.problems
    where = f"{folder}/own.jsonl"
    assert missing.startswith(f"{where}:1: question 0 (counted from 0): image 'no.png' is not a regular file")
    assert broken.startswith(f"{where}:2:") and "not valid JSON" in broken
    assert double == (f"{where}:4: question 3 (counted from 0, id 5): has the same index '5' as {where}:3: question 2 "
                      f"(counted from 0, id 5).")
    with pytest.raises(UserError, match="has no records; there is nothing to ask"):
        read(folder, [])
