"""Damaged headers of safetensors files: one message each, whatever JSON they hold."""

import json

import pytest

from mm.errors import UserError
from mm.formats.safetensors import read_header, read_metadata

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path, header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    return path


@pytest.mark.parametrize("entry", [
    None, 1, [], "F32", {}, GOOD | {"dtype": ["F32"]}, GOOD | {"dtype": None}, GOOD | {"dtype": {}},
    GOOD | {"shape": 2}, GOOD | {"shape": [2.0]}, GOOD | {"shape": ["2"]}, GOOD | {"shape": [True]},
    GOOD | {"shape": [[2]]}, GOOD | {"shape": [-2]}, GOOD | {"shape": [-1, -2]}, GOOD | {"shape": {"2": 2}},
    GOOD | {"shape": [10**400]}, GOOD | {"data_offsets": [0]}, GOOD | {"data_offsets": [0, 4, 8]},
    GOOD | {"data_offsets": [8, 0]}, GOOD | {"data_offsets": [-8, 0]}, GOOD | {"data_offsets": [0, 1e400]},
    GOOD | {"data_offsets": [0.0, 8.0]}, GOOD | {"data_offsets": None}], ids=str)
def test_a_damaged_entry_gets_one_message(tmp_path, entry):
    with pytest.raises(UserError, match=r"one\.safetensors"):
        read_header(write(tmp_path / "one.safetensors", {"weight": entry}))


def test_an_entry_that_is_no_object_is_shown(tmp_path):
    with pytest.raises(UserError, match=r"header \(weight is 5; expected an object\); download it again"):
        read_header(write(tmp_path / "one.safetensors", {"weight": 5}))


@pytest.mark.parametrize("header", [b"[" * 200_000, b"{", b"\xff", b"[]", b"1", b'{"a": ' + b"9" * 5000 + b"}"],
                         ids=lambda header: header[:6])
@pytest.mark.parametrize("read", [read_header, read_metadata])
def test_a_damaged_header_gets_one_message(tmp_path, header, read):
    with pytest.raises(UserError, match=r"one.safetensors has a damaged safetensors header .*download it again"):
        read(write(tmp_path / "one.safetensors", header))


def test_a_length_beyond_the_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "one.safetensors"
    for length in (2**63, 2**64 - 1, 100_000_001, 9):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(UserError, match="is truncated or not a safetensors file"):
            read_header(path)
