"""Benchmark files: cells are those of Python's own reader, images are read from disk, and all errors are reported."""

import base64
import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.errors import UserError
from mm.scoring.tsv import listed, read_table
from tests.scoring.tables import encoded, write_table

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
                      '2\t3" wide\r\n3\ta b\n4\tNone').encode())
    rows = read_table(str(path), ["index"]).rows
    assert [row.line for row in rows] == [3, 5, 6, 7]
    assert [row.texts["question"] for row in rows] == ['two\r\nlines, "and" quotes', '3" wide', "a b", "None"]


@pytest.mark.parametrize(("cell", "expected"), [
    ("14", ("14",)), ("['14']", ("14",)), ("['a', 'b']", ("a", "b")), ('["it\'s"]', ("it's",)),
    ("[1, 2.5]", ("1", "2.5")), ("[]", ("[]",)), ("[{{1}}]", ("[{{1}}]",)), ("[sic]", ("[sic]",)),
])  # fmt: skip
def test_cells_with_several_texts(cell, expected):
    assert listed(cell) == expected


def test_images_come_from_disk_bit_for_bit(tmp_path):
    two = f"['{encoded(1, 'JPEG')}', '{encoded(2)}']"
    path = write_table(tmp_path / "table.tsv", [
        {"index": "7", "text": "two\nlines", "image": encoded(0)}, {"index": "8", "image": two},
        {"index": "9", "image": "7"}, {"index": "10", "image": "9"},
        {"index": "11", "image": f"data:image/png;base64,{encoded(0)}"}, {"index": "12", "image": "!" * 100}])
    rows = read_table(path, ["index", "image"]).rows
    assert [len(row.images) for row in rows] == [1, 2, 1, 1, 1, 1]
    assert rows[0].images == rows[2].images == rows[3].images and all("image" not in row.texts for row in rows)
    assert [one.content for one in rows[1].images] == [
        base64.b64decode(encoded(1, "JPEG")), base64.b64decode(encoded(2))]
    assert rows[4].images[0].content == rows[0].images[0].content == base64.b64decode(encoded(0))
    with pytest.raises(UserError, match=r"table\.tsv:8: image 1 of column 'image': is not base64"):
        rows[5].images[0].content  # noqa: B018


def problems(path: Path, rows: list[dict[str, str]], needed: tuple[str, ...] = ("index", "image")) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        read_table(write_table(path, rows), needed)
    return tuple(problem.removeprefix(f"{path}:") for problem in caught.value.problems)


def test_missing_columns_and_references_to_nothing(tmp_path):
    row = {"index": "0", "Answer": "A", "question": "What?"}
    columns = "its columns are 'index', 'Answer', 'question', separated by tabs."
    assert problems(tmp_path / "t.tsv", [row], ("index", "image", "answer")) == (
        f"1: has no column 'image'; {columns}", f"1: has no column 'answer' (did you mean 'Answer'?); {columns}")
    ends = "; expected the base64 of an image file, or the index of another row with one."
    assert problems(tmp_path / "t.tsv", [
        {"index": "0", "image": encoded(0)}, {"index": "4", "image": "1x"}, {"index": "5", "image": "6"},
        {"index": "6", "image": "5"}]) == tuple(
            f"{line}: column 'image' is {cell!r}{ends}" for line, cell in ((3, "1x"), (4, "6"), (5, "5")))


@pytest.mark.parametrize(("content", "expected"), [
    (b"", ": is empty; expected a TSV file of OpenCompass."),
    (b"index\tq\n1\tx\ty\n", ":2: has 3 cells, but the first line has 2 columns;"),
    (b"index\tq\n1\tx\n1\ty\n", ":3: has the same index '1' as line 2."),
    (b"index\tq\n\tx\n", ":2: has no index; give each row a unique one."),
    (b"index\tq\n1\t\xff\n", ":2: a record begins here that is not TSV in UTF-8"),
    (b'index\tq\n1\t"x\n2\ty\n', ":2: a record begins here that is not TSV in UTF-8 (unexpected end of data)"),
])  # fmt: skip
def test_broken_tables(tmp_path, content, expected):
    path = tmp_path / "t.tsv"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_table(str(path), ["index", "q"])
    assert expected in str(caught.value)
