"""Strict JSON reading."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.config.read import read_json
from mm.errors import UserError

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**25), 10**25) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)


def write(tmp_path, text: str | bytes):
    path = tmp_path / "file.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(tmp_path, text: str | bytes) -> str:
    with pytest.raises(UserError) as caught:
        read_json(write(tmp_path, text))
    return "\n".join(caught.value.problems)


@given(value=JSON_VALUES, indent=st.sampled_from([None, 2]), ascii_only=st.booleans())
def test_reads_what_json_writes(tmp_path_factory, value, indent, ascii_only):
    path = write(tmp_path_factory.mktemp("json"), json.dumps(value, indent=indent, ensure_ascii=ascii_only))
    found = read_json(path).root
    assert found == value
    assert json.dumps(found) == json.dumps(value)  # true is not 1, 1.0 is not 1


@given(text=st.text("{}[],:\"'\\ \n0123456789.eE+-truefalsnN#/", max_size=12))
def test_accepts_nothing_that_json_refuses(tmp_path_factory, text):
    path = write(tmp_path_factory.mktemp("json"), text)
    try:
        ours = read_json(path).root
    except UserError:
        return
    assert json.loads(text) == ours


@pytest.mark.parametrize(("text", "where", "what"), [
    ('{\n  "a": 1,\n}', "2:9", "trailing comma"),
    ("[1, 2,]", "1:6", "trailing comma"),
    ('{"a": 1 // one\n}', "1:9", "no comments"),
    ('# one\n{"a": 1}', "1:1", "no comments"),
    ("{'a': 1}", "1:2", "double quotes"),
    ("""{"a": 'b'}""", "1:7", "double quotes"),
    ('{"a": NaN}', "1:7", "NaN is not JSON"),
    ('{"a":\n -Infinity}', "2:2", "-Infinity is not JSON"),
    ('{"a": 1e999}', "1:7", "too large"),
    ('{"a": True}', "1:7", "write true"),
    ('{"a": 01}', "1:8", "expected ',' or '}'"),
    ('{"a": 1 "b": 2}', "1:9", "expected ',' or '}'"),
    ('{"a" 1}', "1:6", "expected ':'"),
    ('{"a": }', "1:7", "expected a value"),
    ('{"a": 1', "1:8", "the file ends"),
    ('{"a": "b}', "1:7", "Unterminated string"),
    ('{"a": 1} x', "1:10", "unexpected text after"),
    ("", "1:1", "the file ends"),
])
def test_syntax_errors_are_shown_with_their_place(tmp_path, text, where, what):
    message = refusal(tmp_path, text)
    assert f"file.json:{where}: " in message
    assert what in message
    line = text.split("\n")[int(where.split(":")[0]) - 1]
    assert f"\n    {line}\n    {' ' * (int(where.split(':')[1]) - 1)}^" in message


def test_a_python_only_number_is_found_after_strings_that_contain_it(tmp_path):
    assert "file.json:3:8: NaN is not JSON" in refusal(tmp_path, '{"NaN": "NaN \\"NaN",\n "b": [1],\n  "c": NaN}')


def test_endless_nesting_is_refused(tmp_path):
    assert "file.json: too many levels of nesting" in refusal(tmp_path, "[" * 100_000)


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 5000, "1e999"])
def test_numbers_beyond_every_float_are_refused(tmp_path, number):
    assert f"file.json:1:7: the number {number} is too large" in refusal(tmp_path, f'{{"a": {number}}}')


def test_every_duplicate_key_is_named(tmp_path):
    message = refusal(tmp_path, '{"a": 1,\n "b": {"c": 1,\n "c": 2},\n "a": 3}')
    assert "file.json:3: b.c appears twice (first on line 2)" in message
    assert "file.json:4: a appears twice (first on line 1)" in message
    assert "file.json:2: a[1].b appears twice (first on line 2)" in refusal(
        tmp_path, '{"a": [{"b": 1},\n {"b": 1, "b": 2}]}')


def test_a_point_in_a_key_is_no_duplicate(tmp_path):
    assert read_json(write(tmp_path, '{"a.b": 1, "a": {"b": 2}}')).root == {"a.b": 1, "a": {"b": 2}}


def test_a_syntax_error_after_a_duplicate_key_is_reported_first(tmp_path):
    assert "file.json:1:19: unexpected text" in refusal(tmp_path, '{"a": 1, "a": 2}  ] : "\\x"')


def test_byte_order_mark_is_accepted(tmp_path):
    assert read_json(write(tmp_path, '{"a": "\u00e9"}'.encode("utf-8-sig"))).root == {"a": "\u00e9"}


def test_other_encodings_are_named(tmp_path):
    assert "UTF-16" in refusal(tmp_path, '{"a": 1}'.encode("utf-16"))
    message = refusal(tmp_path, '{\n"a": "\u4e2d\u6587"}'.encode("gbk"))
    assert "file.json:2: byte 0xd6 is not UTF-8" in message
    assert "GBK" in message
    assert "file.json:2: byte 0xd6 is not UTF-8" in refusal(tmp_path, b'\xef\xbb\xbf{"a":\n"\xd6"}')


def test_a_missing_file_and_a_directory_are_reported(tmp_path):
    for path, reason in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=reason):
            read_json(path)


def test_a_lone_surrogate_is_refused(tmp_path):
    assert "half of a surrogate pair" in refusal(tmp_path, '{"name": "\\ud800"}')
    assert read_json(write(tmp_path, '{"name": "\\ud83d\\ude00"}')).root == {"name": "\U0001f600"}


def test_a_device_is_refused_unread():
    with pytest.raises(UserError, match="/dev/zero: is not a regular file"):
        read_json("/dev/zero")
