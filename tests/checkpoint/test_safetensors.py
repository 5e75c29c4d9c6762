"""Damaged headers of safetensors files: one message each."""

import json

import pytest

from mm.checkpoint.safetensors import read_header, read_metadata
from mm.errors import UserError


def write(path, header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    return path


@pytest.mark.parametrize("header", [b"{", b"[]"],
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
