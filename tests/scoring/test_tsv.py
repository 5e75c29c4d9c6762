"""Benchmark files: cells equal Python's own reader, pictures are read from disk, and all errors are reported."""

import base64
import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.data.media.picture import load_image
from mm.errors import UserError
from mm.scoring.tsv import listed, read_table
from tests.scoring.tables import encoded, write_table

ROW = {"index": "0", "image": encoded(0), "question": "What?", "answer": "this"}

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0\r", exclude_categories=["Cs"]), max_size=12)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=6))
def test_cells_are_those_of_pythons_reader(tmp_path_factory, cells):
    path = tmp_path_factory.mktemp("tables") / "table.tsv"
    write_table(path, [{"index": str(number), "one": one, "other": other} for number, (one, other) in enumerate(cells)])
    table = read_table(str(path), ["index"])
    with path.open(encoding="utf-8", newline="") as stream:
        expected = list(csv.DictReader(stream, delimiter="\t"))
    assert [dict(row.texts) for row in table.rows] == [
        {name: text for name, text in row.items() if text} for row in expected]


def test_lines_quotes_and_line_ends(tmp_path):
    path = tmp_path / "table.tsv"
    path.write_bytes(('\ufeffindex\tquestion\r\n\r\n1\t"two\r\nlines, ""and"" quotes"\r\n'
                      '2\t3" wide\r\n3\t"a" b').encode())
    rows = read_table(str(path), ["index"]).rows
    assert [row.line for row in rows] == [3, 5, 6]
    assert [row.texts["question"] for row in rows] == ['two\r\nlines, "and" quotes', '3" wide', "a b"]


@pytest.mark.parametrize(("cell", "expected"), [
    ("14", ("14",)), ("['14']", ("14",)), ("['a', 'b']", ("a", "b")),
    ('["it\'s"]', ("it's",)), ("[1, 2.5]", ("1", "2.5")),
    ("[]", ("[]",)), ("[{{1}}]", ("[{{1}}]",)), (f"[{'-' * 20_000}1]", (f"[{'-' * 20_000}1]",)),
    ("[sic]", ("[sic]",)), ("['a'", ("['a'",)), ("(1, 2)", ("(1, 2)",)),
])  # fmt: skip
def test_cells_with_several_texts(cell, expected):
    assert listed(cell) == expected


def test_words_for_missing_values_stay_words(tmp_path):
    """pandas reads these as missing, so programs based on it never show an option "None"."""
    path = write_table(tmp_path / "table.tsv", [{"index": "0", "A": "None", "B": "NA", "C": ""}])
    assert read_table(path, ["index"]).rows[0].texts == {"index": "0", "A": "None", "B": "NA"}


def test_pictures_come_from_disk_bit_for_bit(tmp_path):
    two = f"['{encoded(1, 'JPEG')}', '{encoded(2)}']"
    path = write_table(tmp_path / "table.tsv", [
        {"index": "7", "image": encoded(0)}, {"index": "8", "image": two}, {"index": "9", "image": "7"},
        {"index": "10", "image": "9"}, {"index": "11", "image": f"data:image/png;base64,{encoded(0)}"}])
    rows = read_table(path, ["index", "image"]).rows
    assert [len(row.images) for row in rows] == [1, 2, 1, 1, 1]
    assert rows[0].images == rows[2].images == rows[3].images
    assert [one.content() for one in rows[1].images] == [
        base64.b64decode(encoded(1, "JPEG")), base64.b64decode(encoded(2))]
    assert rows[4].images[0].content() == rows[0].images[0].content()
    written = [one.write(tmp_path) for row in rows for one in row.images]
    assert len(set(written)) == 3  # by content: the last picture is the first one again
    expected = np.random.default_rng(2).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    assert (np.asarray(load_image(written[2])) == expected).all()
    assert all("image" not in row.texts for row in rows)


def problems(path: Path, rows: list[dict[str, str]], needed: tuple[str, ...] = ("index", "image")) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        read_table(write_table(path, rows), needed)
    return tuple(problem.removeprefix(f"{path}:") for problem in caught.value.problems)


def test_missing_columns(tmp_path):
    row = {"index": "0", "Answer": "A", "question": "What?"}
    assert problems(tmp_path / "t.tsv", [row], ("index", "image", "answer")) == (
        "1: has no column 'image'; its columns are 'index', 'Answer', 'question', separated by tabs; rename "
        "the right column, or use OpenCompass's file of this benchmark.",
        "1: has no column 'answer' (did you mean 'Answer'?); its columns are 'index', 'Answer', 'question', separated "
        "by tabs.")


def test_invalid_pictures(tmp_path):
    web_page = base64.b64encode(b"<!doctype html><title>404 not found</title>" * 3).decode()
    found = problems(tmp_path / "t.tsv", [
        {**ROW}, {**ROW, "index": "1", "image": "!" * 100}, {**ROW, "index": "2", "image": web_page},
        {**ROW, "index": "3", "image": f"['{encoded(0)}', '']"}, {**ROW, "index": "4", "image": "1x"}])
    where = tmp_path / "t.tsv"
    assert found == (
        "3: image 1 of column 'image': is not base64 (Only base64 data is allowed), starting with "
        "b'!!!!!!!!!!!!!!!!!!!!!!!!'; encode the bytes of an image file as base64.",
        "4: image 1 of column 'image': is not an image that Pillow can read: it is a web page; "
         "the download failed: fetch the file itself.",
        "5: image 2 of column 'image': is empty; encode the bytes of an image file as base64.")
    good = [{**ROW}, {**ROW, "index": "4", "image": "1x"}, {**ROW, "index": "5", "image": "6"},
            {**ROW, "index": "6", "image": "5"}]
    ends = "; expected the base64 of an image file, or the index of another row with one."
    assert problems(where, good) == (
        f"3: column 'image' is '1x', which is not an index of this file{ends}",
        f"4: column 'image' is '6', which leads to no image{ends}",
        f"5: column 'image' is '5', which leads to no image{ends}")


def test_broken_tables(tmp_path):
    path = tmp_path / "t.tsv"
    for content, expected in (
        (b"", f"{path}: is empty; expected a TSV file of OpenCompass."),
        (b"index\tindex\n1\t2\n", f"{path}:1: has the column 'index' twice; expected unique names."),
        (b"index\tq\n1\tx\ty\n", f"{path}:2: has 3 cells, but the first line has 2 columns; tabs separate cells, "
                                 f"and a cell that contains a tab or a line break needs quotes."),
        (b"index\tq\n1\tx\n1\ty\n", f"{path}:3: has the same index '1' as line 2; expected unique indices."),
        (b"index\tq\n\tx\n", f"{path}:2: has no index; give each row a unique one."),
        (b"index\tq\n1\t\xff\n", f"{path}:2: byte 0xff is not UTF-8; convert the file, for example with 'iconv -f GBK "
                                 f"-t UTF-8'."),
        (b'index\tq\n1\t"x\n2\ty\n', f"{path}:2: a cell starts with a quote here that is never closed; double the "
                                     f"quotes inside cells, and add one at the end."),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            read_table(str(path), ["index"])
        assert caught.value.problems == (expected,)
    with pytest.raises(UserError, match=r"no_file\.tsv: cannot be read \(No such file or directory\)"):
        read_table(str(tmp_path / "no_file.tsv"), ["index"])


def test_at_most_twenty_of_thousands_of_wrong_rows_are_reported(tmp_path):
    path = tmp_path / "t.tsv"
    path.write_text("index\tq\n" + "1\n" * 5000)
    with pytest.raises(UserError) as caught:
        read_table(str(path), ["index"])
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1] == f"{path}: reading stopped at line 21; more problems may follow."
