"""Strict JSON reading."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.config.strict_json import read_json
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


@given(value=JSON_VALUES, indent=st.sampled_from([None, 2]), ascii_only=st.booleans())
def test_reads_what_json_writes(tmp_path_factory, value, indent, ascii_only):
    path = write(tmp_path_factory.mktemp("json"), json.dumps(value, indent=indent, ensure_ascii=ascii_only))
    assert json.dumps(read_json(path).root) == json.dumps(value)  # true is not 1, 1.0 is not 1


@pytest.mark.parametrize(("text", "message"), [
    ('{\n  "a": 1 // one\n}', "file.json:2:10: Expecting ',' delimiter, in '\"a\": 1 // one'; JSON has double quotes"),
    ('{"a": True}', "file.json:1:7: Expecting value"),
    ('{"a": 1', "file.json:1:8: "),
    ("", "file.json:1:1: Expecting value"),
    ('{"a": NaN}', "file.json: NaN is not JSON"),
    ("[" * 100_000, "file.json: too many levels of nesting"),
    ('{"a": ' + "9" * 5000 + "}", "file.json: "),
    ('{"b": {"c": 1,\n "c": 2}}', "file.json: c appears twice in one object; remove one of the two"),
    ('{"a": "\u4e2d\u6587"}'.encode("gbk"), "file.json: byte 0xd6 is not UTF-8; save the file as UTF-8"),
])
def test_what_is_not_json_is_refused(tmp_path, text, message):
    with pytest.raises(UserError) as caught:
        read_json(write(tmp_path, text))
    assert message in str(caught.value)


def test_positions_in_a_document(tmp_path):
    document = read_json(write(tmp_path, '{"a.b": 1, "a": {"b": null}, "c": "\u00e9"}'.encode("utf-8-sig")))
    assert [document.has(one) for one in ("", "a", "a.b", "a.c", "d.e")] == [True, True, True, False, False]
    assert document.get("a.b") is None and document.get("c") == "\u00e9"


def test_what_cannot_be_read_is_reported(tmp_path):
    for path, reason in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory"),
                         ("/dev/zero", "is not a regular file")):
        with pytest.raises(UserError, match=reason):
            read_json(path)
