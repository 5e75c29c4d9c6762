"""Strict JSON reading, and tables of keys."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.config.json_file import read_json
from mm.config.json_schema import (
    BOOL,
    COUNT,
    FLOAT,
    INT,
    LAYOUT,
    PATHS,
    TEXT,
    Fixed,
    Inert,
    SchemaReader,
    Takes,
    optional,
)
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
    ("[" * 200, "1:102", "levels of nesting"),
])
def test_wrong_syntax_is_shown_where_it_stands(tmp_path, text, where, what):
    message = refusal(tmp_path, text)
    assert f"file.json:{where}: " in message
    assert what in message
    line = text.split("\n")[int(where.split(":")[0]) - 1]
    assert f"\n    {line}\n    {' ' * (int(where.split(':')[1]) - 1)}^" in message


def test_every_duplicate_key_is_named(tmp_path):
    message = refusal(tmp_path, '{"a": 1,\n "b": {"c": 1,\n "c": 2},\n "a": 3}')
    assert "file.json:3: b.c appears twice (first on line 2)" in message
    assert "file.json:4: a appears twice (first on line 1)" in message


def test_byte_order_mark_is_accepted(tmp_path):
    assert read_json(write(tmp_path, '{"a": "\u00e9"}'.encode("utf-8-sig"))).root == {"a": "\u00e9"}


def test_other_encodings_are_named(tmp_path):
    assert "UTF-16" in refusal(tmp_path, '{"a": 1}'.encode("utf-16"))
    message = refusal(tmp_path, '{\n"a": "\u4e2d\u6587"}'.encode("gbk"))
    assert "file.json:2: byte 0xd6 is not UTF-8" in message
    assert "GBK" in message


def test_missing_file_and_directory_are_told(tmp_path):
    for path, reason in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=reason):
            read_json(path)


@dataclass(frozen=True)
class Tower:
    num_layers: int
    rate: float = 0.5
    name: str | None = "x"
    frozen: bool = False
    layout: tuple = ()


TABLE = {
    "num_layers": Takes(COUNT),
    "learning_rate": Takes(FLOAT, field="rate"),
    "name": Takes(optional(TEXT)),
    "frozen": Takes(BOOL),
    "layout": Takes(LAYOUT),
    "activation": Fixed(("silu",), "it is built that way"),
    "dropout": Fixed((0.0,)),
    "fused": Inert("kernels choose themselves"),
}


def built(tmp_path, tower: str):
    reader = SchemaReader(read_json(write(tmp_path, '{\n"tower": ' + tower + "\n}")))
    return reader.build(Tower, "tower", reader.values("tower", TABLE), TABLE), reader


def test_object_becomes_dataclass(tmp_path):
    tower, reader = built(tmp_path, '{"num_layers": 2.0, "learning_rate": 1, "name": null, "layout": [1, 2], '
                                    '"activation": "silu", "dropout": 0, "fused": true}')
    assert tower == Tower(2, 1.0, None, False, ((1, 2),))
    assert type(tower.num_layers) is int
    assert type(tower.rate) is float
    assert reader.problems == []
    assert reader.notes() == [f"{tmp_path}/file.json: kernels choose themselves; no effect: tower.fused"]


def test_all_problems_are_collected(tmp_path):
    tower, reader = built(tmp_path, '{"num_layer": 2,\n"frozen": 1,\n"name": 3,\n'
                                    '"activation": "gelu",\n"dropout": 0.1}')
    assert tower is None
    told = [problem.removeprefix(f"{tmp_path}/file.json") for problem in reader.problems]
    assert told == [
        ":2: tower.num_layer is not a known key (did you mean 'num_layers'?)",
        ":3: tower.frozen is 1; expected true or false",
        ":4: tower.name is 3; expected a string or null",
        ':5: tower.activation is "gelu"; supported: "silu" (it is built that way)',
        ":6: tower.dropout is 0.1; supported: 0.0 (this is the only way the model is computed here)",
        ": tower.num_layers is missing; expected an integer of at least 1",
    ]


@pytest.mark.parametrize("value", ["true", '"2"', "2.5", "0", "null", "[2]"])
def test_count_is_a_positive_integer(tmp_path, value):
    tower, reader = built(tmp_path, f'{{"num_layers": {value}}}')
    assert tower is None
    assert reader.problems == [
        f"{tmp_path}/file.json:2: tower.num_layers is {value}; expected an integer of at least 1"
    ]


@pytest.mark.parametrize("value", ["null", "[]", "3"])
def test_section_must_be_an_object(tmp_path, value):
    tower, reader = built(tmp_path, value)
    assert tower is None
    assert len(reader.problems) == 1
    assert "expected an object" in reader.problems[0]


def test_both_layout_forms():
    assert LAYOUT.read([3, 0]) == ((3, 0),)
    assert LAYOUT.read([[1, 2], [3, 4.0]]) == ((1, 2), (3, 4))
    for wrong in (3, [1, [2]], [[1], 2], [1.5], ["1"], [True]):
        with pytest.raises(TypeError):
            LAYOUT.read(wrong)


def test_paths_and_numbers():
    assert PATHS.read("a.json, b.json") == ("a.json", "b.json")
    assert PATHS.read(["a.json"]) == ("a.json",)
    for wrong in ("", "a,,b", [], 3):
        with pytest.raises(TypeError):
            PATHS.read(wrong)
    with pytest.raises(TypeError):
        FLOAT.read(True)
    with pytest.raises(TypeError):
        INT.read(False)
