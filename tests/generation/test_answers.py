"""The answers file: complete lines only, no prompt twice, sorted at the end."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.errors import UserError
from mm.generation.answers import AnswerFile
from tests.files import json_lines

KEYS = {number: f"key {number}" for number in range(10)}


def answer(number: int) -> dict:
    return {"number": number, "answer": f"{number} ünï", "key": KEYS[number]}


@given(order=st.permutations(range(10)), cut_after=st.integers(0, 10), torn=st.integers(0, 30))
def test_an_interruption_anywhere_changes_nothing(order, cut_after, torn, tmp_path_factory):
    path = tmp_path_factory.mktemp("answers") / "new" / "a.jsonl"
    file = AnswerFile(path, KEYS)
    file.add(map(answer, order[:cut_after]))
    file.add([])
    whole = path.read_bytes()
    half = json.dumps(answer(order[cut_after % 10])).encode()[:torn]
    path.write_bytes(whole + half)
    os.close(file._file)  # as the end of the process does
    again = AnswerFile(path, KEYS)
    assert again.numbers == set(order[:cut_after])
    again.add(map(answer, order))
    again.close()
    assert json_lines(path) == [answer(number) for number in range(10)]


def test_a_lone_surrogate_is_kept_as_an_escape(tmp_path):
    file = AnswerFile(tmp_path / "a.jsonl", KEYS)
    half = {**answer(1), "answer": "\ud83d, half of a surrogate pair"}
    file.add([half])
    file.close()
    assert json_lines(tmp_path / "a.jsonl") == [half]


def test_a_second_run_is_refused_while_the_first_writes(tmp_path):
    path = tmp_path / "a.jsonl"
    first = AnswerFile(path, KEYS)
    with pytest.raises(UserError, match="is being written by another run"):
        AnswerFile(path, KEYS)
    first.close()
    AnswerFile(path, KEYS).close()


@pytest.mark.parametrize(("content", "what"), [
    ('{"number": 1, "key": "key 1"}\nnonsense\n', ":2: is not an answer of mm.generate"),
    ('{"number": 1, "key": "other"}\n', ":1: answers a different prompt 1"),
    ('{"number": 11, "key": "key 11"}\n', ":1: answers a different prompt 11"),
    ('{"number": 1, "key": "key 1"}\n' * 2, ":2: is a second answer to prompt 1"),
    ("[]\n", ":1: is not an answer"),
])
def test_another_file_is_refused_and_unchanged(tmp_path, content, what):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=what):
        AnswerFile(path, KEYS)
    assert path.read_text() == content


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"--output: .*pipe cannot be written .*not a regular file.*remove it"):
        AnswerFile(tmp_path / "pipe", KEYS)


def test_an_unwritable_path_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        AnswerFile(tmp_path / "file" / "a.jsonl", KEYS)
