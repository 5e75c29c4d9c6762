"""The content of a file, not its name, decides how it is opened, and every kind is read by the same methods."""

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.data.records import records
from mm.data.records.records import open_records
from mm.errors import UserError

RECORDS = [{"name": "one", "count": 1}, {"name": "zwölf", "count": 12}, {"name": "three", "count": 3}]


def write_list(path: Path) -> None:
    path.write_text("\n" + json.dumps(RECORDS, indent=1, ensure_ascii=False), encoding="utf-8")


def write_lines(path: Path) -> None:
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS), encoding="utf-8-sig")


def write_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path, row_group_size=2)


LINES: dict[Callable[[Path], None], list[int]] = {
    write_list: [3, 7, 11], write_lines: [1, 2, 3], write_parquet: [0, 0, 0]}
"""For the writer of each kind of file: the lines in which its records begin."""


@pytest.mark.parametrize("write", LINES)
def test_every_kind_is_read_by_the_same_methods(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path, problems = tmp_path / "records.txt", list[str]()
    write(path)
    file = pickle.loads(pickle.dumps(open_records(str(path))))
    found = list(file.records(problems))
    assert problems == [] and [one.index for one in found] == [0, 1, 2]
    assert [one.value for one in found] == [file.read(one.span) for one in found] == RECORDS
    assert [one.line for one in found] == LINES[write]
    assert [file.where(one) for one in found] == [
        f"{path}:{line}" if line else f"{path}: record {number}" for number, line in enumerate(LINES[write])]
    before = file.content_hash()
    os.utime(path, ns=(0, 0))
    for use in (lambda: file.read(found[0].span), lambda: next(file.blocks([])), file.content_hash):
        with pytest.raises(UserError, match=r"records.txt: has changed since this run checked it; start the run again"):
            use()
    assert open_records(str(path)).content_hash() == before
    path.unlink()
    with pytest.raises(UserError, match=r"records.txt: can no longer be read: No such file or directory"):
        file.read(found[0].span)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "wide").write_text("{}", encoding="utf-16")
    (tmp_path / "cut").write_bytes(b"PAR1 and nothing more")
    for name, problem in (("wide", "is a binary, packed or UTF-16 file"), ("cut", "is not a complete Parquet file"),
                          ("absent", "is not a regular file")):
        with pytest.raises(UserError, match=problem):
            open_records(str(tmp_path / name))


texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8)
spaces = st.text(" \t\r\n", max_size=4)


def found_in(content: bytes, is_list: bool) -> list[tuple[bytes, int]]:
    """The bytes of each record, and its line.  Raises UserError."""
    find = records._list_spans if is_list else records._line_spans
    return [(content[start:end].strip(), line) for block in find(io.BytesIO(content)) for start, end, line in block]


@pytest.fixture(params=[1, 7, 1 << 18], autouse=True)
def block_bytes(request, monkeypatch):
    """Blocks of one byte, so that blocks end at every possible position."""
    monkeypatch.setattr(records, "BLOCK_BYTES", request.param)


@given(some=st.lists(values, min_size=1, max_size=6), escaped=st.booleans(), data=st.data())
@pytest.mark.parametrize("is_list", [True, False])
def test_records_are_found_with_their_lines(is_list, some, escaped, data):
    written = [json.dumps(record, ensure_ascii=escaped).encode() for record in some]
    content, expected = b"[" * is_list, []
    for number, one in enumerate(written):
        content += (b"," if is_list else b"\r\n") * bool(number) + data.draw(spaces).encode()
        expected.append((one, content.count(b"\n") + 1))
        content += one + data.draw(spaces).encode()
    assert found_in(content + b"]" * is_list + data.draw(spaces).encode(), is_list) == expected


@given(st.lists(values, min_size=1, max_size=3), st.data())
def test_a_list_truncated_anywhere_is_detected(some, data):
    content = json.dumps(some).encode()
    with pytest.raises(UserError, match=":1: record"):
        found_in(content[: data.draw(st.integers(1, len(content) - 1))], True)


@pytest.mark.parametrize("content", [b"[1] 2", b"[1]]", b"[] x", b"[1,]", b"[,1]", b"[1 2]", b"[1,,2]", b"[1}",
                                     b"[tru]", b"['a']"])
def test_other_content_is_detected(content):
    with pytest.raises(UserError):
        found_in(content, True)


def test_an_unterminated_record_is_not_read_to_the_end_of_the_file(monkeypatch):
    monkeypatch.setattr(records, "_MAX_RECORD_BYTES", 1 << 10)
    monkeypatch.setattr(records, "BLOCK_BYTES", 64)
    stream = io.BytesIO(b'[1,\n"' + b"x" * 5_000_000)
    with pytest.raises(UserError, match=r":2: record 1 \(counted from 0\): not valid JSON: Unterminated string"):
        list(records._list_spans(stream))
    assert stream.tell() <= 4 << 10
