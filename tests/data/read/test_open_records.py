"""The content of a file, not its name, decides how it is opened, and every kind is read by the same methods."""

import gzip
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from mm.data.read.json_file import JsonFile
from mm.data.read.open_records import open_records
from mm.data.read.parquet_file import ParquetFile
from mm.data.read.records import RecordFile
from mm.data.read.spans import line_spans, list_spans
from mm.errors import UserError

RECORDS = [{"name": "one", "count": 1}, {"name": "zwölf", "count": 12}, {"name": "three", "count": 3}]


def write_list(path: Path) -> None:
    path.write_text("\n" + json.dumps(RECORDS, indent=1, ensure_ascii=False), encoding="utf-8")


def write_lines(path: Path) -> None:
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS), encoding="utf-8-sig")


def write_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path, row_group_size=2)


LINES: dict[Callable[[Path], None], list[int | None]] = {
    write_list: [3, 7, 11], write_lines: [1, 2, 3], write_parquet: [None, None, None]}
"""For the writer of each kind of file: the lines in which its records begin."""


@pytest.fixture(params=LINES, ids=["list", "lines", "parquet"])
def write(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return request.param


def test_the_first_bytes_determine_the_kind(tmp_path: Path) -> None:
    path = tmp_path / "records.txt"
    kinds = []
    for write in LINES:
        write(path)
        file = open_records(str(path))
        kinds.append((type(file), getattr(file, "find", None), file.spans_are_bytes))
    assert kinds == [(JsonFile, list_spans, True), (JsonFile, line_spans, True), (ParquetFile, None, False)]


def test_every_kind_is_read_by_the_same_methods(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path, problems = tmp_path / "records", list[str]()
    write(path)
    file: RecordFile = pickle.loads(pickle.dumps(open_records(str(path))))
    found = list(file.records(problems))
    assert problems == [] and [one.index for one in found] == [0, 1, 2]
    assert [one.value for one in found] == [file.read(one.span) for one in found] == RECORDS
    assert [file.line(one.span) for one in found] == [one.line or None for one in found] == LINES[write]
    assert [file.where(one) for one in found] == [
        f"{path}: record {number}" if line is None else f"{path}:{line}" for number, line in enumerate(LINES[write])]
    assert file.remarks() == []


def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "records"
    write(path)
    file = open_records(str(path))
    span, before = next(file.records([])).span, file.content_hash()
    os.utime(path, ns=(0, 0))
    for use in (lambda: file.read(span), lambda: file.line(span), file.content_hash):
        with pytest.raises(UserError, match="records: has changed since this run checked it; start the run again"):
            use()
    assert open_records(str(path)).content_hash() == before
    path.unlink()
    with pytest.raises(UserError, match="records: can no longer be read: No such file or directory"):
        file.read(span)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(gzip.compress(b"{}"))
    (tmp_path / "wide").write_text("{}", encoding="utf-16")
    (tmp_path / "cut").write_bytes(b"PAR1 and nothing more")
    (tmp_path / "image").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    with tarfile.open(tmp_path / "tar", "w") as tar, zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        tar.add(tmp_path / "wide", "wide")
        archive.write(tmp_path / "wide", "wide")
    for name, problem in (("tar", "tar: is a tar archive; unpack it, and name the JSON"), ("zip", "is a zip archive;"),
                          ("image", "is a binary file"), ("packed", r"is compressed \(gzip\)"),
                          ("wide", "is in UTF-16; save it as UTF-8"),
                          ("cut", "is not a complete Parquet file"), ("absent", "is not a regular file"),
                          ("", "is not a regular file")):
        with pytest.raises(UserError, match=problem):
            open_records(str(tmp_path / name))
