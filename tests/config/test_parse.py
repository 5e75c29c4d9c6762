"""Strict JSON files, and from a file to a dataclass: what is converted, and how each error is reported."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic.dataclasses import dataclass

from mm.config.data import Paths
from mm.config.layers import Layers
from mm.config.mindspeed import Fixed, Inert
from mm.config.parse import STRICT, Count, Int, Key, Number, OrDefault, ReadSettings, read_json, read_settings
from mm.errors import UserError


@dataclass(frozen=True, config=STRICT)
class Inner:
    mode: Literal["fast", "slow"] | None = None


@dataclass(frozen=True, config=STRICT)
class Tower:
    num_layers: Annotated[Count, Key("tower.num_layers")]
    rate: Annotated[Number, Key("tower.learning_rate", alias="lr")] = 0.5
    name: Annotated[str | None, Key("tower.name")] = "x"
    frozen: Annotated[bool, Key("tower.frozen")] = False
    layout: Annotated[Layers, Key("tower.layout")] = ()
    paths: Annotated[Paths, Key("tower.paths")] = ("p",)
    width: Annotated[Int, OrDefault, Key("tower.width")] = 3
    inner: Annotated[Inner, Key("tower.inner_")] = Inner()


TABLES = {
    "": {},
    "tower": {
        "activation": Fixed(("silu",), "it is built that way"),
        "dropout": Fixed((0.0,)),
        "fused": Inert("kernels choose themselves"),
        "half": Fixed((True, False), "it repeats a flag"),
    },
    "extra": {},
}


def rules(tower: Tower) -> Iterator[str]:
    if tower.width == 13:
        yield "tower.width is 13"
    if tower.rate == 13:
        yield "tower.learning_rate is 13"


def write(tmp_path, text: str | bytes) -> Path:
    path = tmp_path / "file.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read(tmp_path, text: str) -> ReadSettings[Tower]:
    return read_settings(write(tmp_path, text), Tower, TABLES, rules)


def built(tmp_path, tower: str) -> ReadSettings[Tower]:
    return read(tmp_path, '{\n"tower": ' + tower + "\n}")


def reported(tmp_path, tower: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        built(tmp_path, tower)
    return [problem.removeprefix(f"{tmp_path}/file.json") for problem in caught.value.problems]


def test_object_becomes_dataclass(tmp_path):
    read = built(tmp_path, '{"num_layers": 2.0, "learning_rate": 1, "name": null, "layout": [1, 2], "width": null, '
                           '"activation": "silu", "dropout": 0, "fused": true, "inner_mode": "slow", "half": false}')
    assert read.value == Tower(2, 1.0, None, False, ((1, 2),), ("p",), 3, Inner("slow"))
    assert type(read.value.num_layers) is int
    assert type(read.value.rate) is float
    assert read.notes == (f"tower.fused of {tmp_path}/file.json: no effect: kernels choose themselves",)


def test_all_problems_are_collected(tmp_path):
    found = reported(tmp_path, '{"num_layer": 2,\n"frozen": 1,\n"name": 3,\n"activation": "gelu",\n"dropout": 0.1,\n'
                               '"inner_mode": "slov",\n"half": 1}')
    assert sorted(found) == sorted([
        ": tower.num_layer is not a known key (did you mean 'num_layers'?)",
        ": tower.frozen is 1; expected true or false",
        ": tower.name is 3; expected a string or null",
        ': tower.activation is "gelu"; supported: "silu" (it is built that way)',
        ": tower.dropout is 0.1; supported: 0.0 (the only value that this model supports)",
        ": tower.inner_mode is \"slov\"; supported: \"fast\" or \"slow\" (did you mean 'slow'?)",
        ": tower.half is 1; supported: true or false (it repeats a flag)",
        ": tower.num_layers is missing; expected an integer of at least 1",
    ])


def test_rules_are_checked_when_all_values_are_valid(tmp_path):
    assert reported(tmp_path, '{"num_layers": 1, "width": 13, "learning_rate": 13}') == [
        ": tower.width is 13", ": tower.learning_rate is 13"]
    assert len(reported(tmp_path, '{"num_layers": 0, "width": 13}')) == 1


def test_two_names_of_one_setting(tmp_path):
    for also in ("", ', "learning_rate": 2'):
        assert read(tmp_path, '{"tower": {"num_layers": 1' + also + '},\n"lr": 2}').value.rate == 2.0
    with pytest.raises(UserError, match=r"json: lr differs from tower\.learning_rate"):
        read(tmp_path, '{"tower": {"num_layers": 1, "learning_rate": 1},\n"lr": 2}')


def test_only_objects_without_settings_may_be_null(tmp_path):
    assert read(tmp_path, '{"tower": {"num_layers": 1}, "extra": null}').value == Tower(1)
    with pytest.raises(UserError, match=r"extra is 3; expected an object \{\.\.\.\} or null"):
        read(tmp_path, '{"tower": {"num_layers": 1}, "extra": 3}')


@pytest.mark.parametrize("root", ["[]", "3", "null"])
def test_the_file_must_be_an_object(tmp_path, root):
    with pytest.raises(UserError) as caught:
        read(tmp_path, root)
    assert caught.value.problems == (f"{tmp_path}/file.json: the file is {root}; expected an object {{...}}",)


def read_key(tmp_path, key: str, value: object) -> object:
    return getattr(built(tmp_path, json.dumps({"num_layers": 1, key: value})).value, key)


def test_both_layout_forms(tmp_path):
    assert read_key(tmp_path, "layout", [3, 0]) == ((3, 0),)
    assert read_key(tmp_path, "layout", [[1, 2], [3, 4.0]]) == ((1, 2), (3, 4))
    for wrong in (3, [1, [2]], [[1], 2], [1.5], ["1"], [True]):
        assert reported(tmp_path, json.dumps({"num_layers": 1, "layout": wrong})) == [
            f": tower.layout is {json.dumps(wrong)}; expected a list of integers [pp], or a list of such lists "
            f"[vpp][pp]"]


def test_paths_and_numbers(tmp_path):
    assert read_key(tmp_path, "paths", "a.json, b.json") == ("a.json", "b.json")
    assert read_key(tmp_path, "paths", ["a.json"]) == ("a.json",)
    for key, wrong in (("paths", ""), ("paths", "a,,b"), ("paths", []), ("paths", 3), ("learning_rate", True),
                       ("learning_rate", "2"), ("width", False)):
        assert f"tower.{key} is {json.dumps(wrong)}; expected" in reported(
            tmp_path, json.dumps({"num_layers": 1, key: wrong}))[0]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**25), 10**25) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)


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
    for path, reason in ((tmp_path / "none.json", "No such file"), (tmp_path, "not a regular file"),
                         ("/dev/zero", "not a regular file")):
        with pytest.raises(UserError, match=reason):
            read_json(path)
