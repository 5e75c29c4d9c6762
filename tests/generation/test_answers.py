"""The answers file: complete lines only, no prompt twice, sorted at the end."""

import json

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
    file._stream.close()  # as the end of the process does
    half = json.dumps(answer(order[cut_after % 10])).encode()[:torn]
    path.write_bytes(path.read_bytes() + half)
    again = AnswerFile(path, KEYS)
    assert again.numbers == set(order[:cut_after])
    again.add(map(answer, order))
    again.close()
    assert json_lines(path) == [answer(number) for number in range(10)]


@pytest.mark.parametrize(("content", "line"), [
    ('{"number": 1, "key": "key 1"}\nnonsense\n', 2), ('{"number": 1, "key": "other"}\n', 1), ("[]\n", 1),
    ('{"number": 11, "key": "key 11"}\n', 1)])
def test_another_file_is_refused_and_unchanged(tmp_path, content, line):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=f":{line}: is no answer to one of these prompts, or was made with other weigh"):
        AnswerFile(path, KEYS)
    assert path.read_text() == content
