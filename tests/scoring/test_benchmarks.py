"""Benchmark files as questions: the published prompts, placement of pictures, cells, and rows that cannot be asked."""

import base64
import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.data.sample import Inline
from mm.errors import UserError
from mm.scoring.benchmarks import BENCHMARKS, Items, listed, placed, prompt, read_benchmark, read_table
from tests.scoring.tables import encoded, write_table

SELECT = "Please select the correct answer from the options above."
AI2D = {"index": "0", "image": encoded(0), "question": "Which is it?", "A": "sun", "B": "moon", "C": "", "answer": "B",
        "category": "sky"}  # fmt: skip
WORDS = {"index": "0", "image": encoded(0), "question": "How many?", "answer": "['2', 'two']", "split": "test_human"}
MMMU = {
    "index": "dev_1", "image": f"['{encoded(1)}', '{encoded(2)}']", "question": "Is <image 2> like <image 1>?",
    "hint": "Look.", "A": "yes", "B": "only <image 2>", "answer": "A", "split": "dev", "category": "Art",
    "l2-category": "Art & Design"}  # fmt: skip


def read(tmp_path, name: str, rows: list[dict[str, str]], custom: bool = False) -> Items:
    return read_benchmark(write_table(tmp_path / f"{name}.tsv", rows), BENCHMARKS[name], custom)


def asked(items: Items) -> list[list[str]]:
    """The texts and picture numbers of each item."""
    def shown(part) -> str:
        if isinstance(part, str):
            return part
        return str(part.path.source.number) if isinstance(part.path, Inline) else part.path

    return [[shown(part) for part in item.content] for item in items.items]


@pytest.mark.parametrize("custom", [False, True])
def test_ai2d(tmp_path, custom):
    items = read(tmp_path, "ai2d", [AI2D, {**AI2D, "index": "1", "image": "0", "hint": "Look.", "answer": "A"}], custom)
    text = "Question: Which is it?\nOptions:\nA. sun\nB. moon\n" + SELECT + ("" if custom else " \n")
    assert asked(items)[0] == ["0", text]
    first, second = items.items
    assert (first.right, first.options, first.groups) == (("B",), {"A": "sun", "B": "moon"}, {"category": "sky"})
    assert first.where == f"{tmp_path / 'ai2d.tsv'}:2" and second.content[0] == first.content[0]


def test_hints_come_first_and_chinese_is_answered_by_a_letter(tmp_path):
    rows = [{**AI2D, "hint": "Look."}, {**AI2D, "index": "1", "question": "哪个?"}]
    assert [texts[1] for texts in asked(read(tmp_path, "ai2d", rows, True))] == [
        "Hint: Look.\nQuestion: Which is it?\nOptions:\nA. sun\nB. moon\n" + SELECT,
        "Question: 哪个?\nOptions:\nA. sun\nB. moon\n请直接回答选项字母。"]


@pytest.mark.parametrize(("name", "rule"), [("chartqa", "relaxed"), ("docvqa", "anls")])
@pytest.mark.parametrize(("custom", "ending"), [
    (False, "\nAnswer the question using a single word or phrase."),
    (True, "\nPlease try to answer the question with short words or phrases if possible.")])
def test_few_words(tmp_path, name, rule, custom, ending):
    items = read(tmp_path, name, [WORDS], custom)
    assert items.rule == rule and asked(items) == [["0", "How many?" + ending]]
    assert items.items[0].right == ("2", "two") and items.items[0].options == {}


def test_mmmu_between_words_or_in_front(tmp_path):
    items = read(tmp_path, "mmmu", [MMMU])
    assert asked(items) == [["Hint: Look.\nQuestion: Is ", "1", " like ", "0", "?\nOptions:\nA. yes\nB. only ", "1",
                             f"\n{SELECT} \n"]]
    assert items.headline_split == "validation"
    text = f"Hint: Look.\nQuestion: Is <image 2> like <image 1>?\nOptions:\nA. yes\nB. only <image 2>\n{SELECT}"
    assert asked(read(tmp_path, "mmmu", [MMMU], True)) == [["0", "1", text]]


def test_open_questions_of_mmmu(tmp_path):
    row = {**MMMU, "A": "", "B": "", "hint": "", "question": "How long is it?", "answer": "['2.5', '5/2']"}
    items = read(tmp_path, "mmmu", [row])
    assert asked(items) == [["0", "1", "Question: How long is it?\n"]]
    assert items.items[0].options == {} and items.items[0].right == ("2.5", "5/2")


def test_picture_placeholders():
    assert placed("no mark", 2) == (0, 1, "no mark")
    assert placed("<image 1><image 1>end", 2) == (0, 0, "end")
    assert placed("<image 10> is no mark", 1) == (0, "<image 10> is no mark")
    assert prompt("few words", False, "q", "a hint that is not shown", {}, 0) == (
        "q\nAnswer the question using a single word or phrase.",)


def test_pictures_by_path_lie_below_the_file(tmp_path):
    (tmp_path / "in").mkdir()
    outside = tmp_path / "b.png"
    for path in (tmp_path / "in" / "a.png", outside):
        path.write_bytes(b"a picture, at some time")
    row = {name: value for name, value in WORDS.items() if name != "image"}
    assert asked(read(tmp_path / "in", "chartqa", [{**row, "image_path": "a.png"}]))[0][0] == str(tmp_path / "in/a.png")
    with pytest.raises(UserError) as caught:
        read(tmp_path / "in", "chartqa", [{**row, "image_path": "['a.png', 'c.png']"}, {
            **row, "index": "1", "image_path": str(outside)}])
    missing, other = caught.value.problems
    assert missing.startswith(f"{tmp_path}/in/chartqa.tsv:2: image 'c.png' is not a regular file, neither as")
    assert other.startswith(f"{tmp_path}/in/chartqa.tsv:3: image {str(outside)!r} resolves to")


def test_rows_without_a_picture_are_left_out_with_a_note(tmp_path):
    items = read(tmp_path, "chartqa", [WORDS, {**WORDS, "index": "1", "image": ""}])
    assert len(items.items) == 1
    table = tmp_path / "chartqa.tsv"
    assert items.notes == (f"{table}: 1 row without an image left out, as in VLMEvalKit",)
    with pytest.raises(UserError, match="has no rows with an image; there is nothing to ask"):
        read(tmp_path, "chartqa", [{**WORDS, "image": ""}])


@pytest.mark.parametrize(("name", "row", "expected"), [
    ("ai2d", {**AI2D, "answer": "C"}, "column 'answer' is 'C'; expected the letter of one of several options: A, B."),
    ("ai2d", {**AI2D, "B": ""}, "column 'answer' is 'B'; expected the letter of one of several options: A."),
    ("docvqa", {**WORDS, "answer": ""},
     "column 'answer' is empty, so it cannot be scored; use a split with published answers (validation)."),
    ("docvqa", {**WORDS, "question": ""}, "column 'question' is empty; expected a question."),
    ("mmmu", {**MMMU, "image": encoded(1)}, "refers to <image 2>, but has 1 image in column 'image'."),
])  # fmt: skip
def test_rows_that_cannot_be_asked(tmp_path, name, row, expected):
    with pytest.raises(UserError) as caught:
        read(tmp_path, name, [row])
    assert caught.value.problems == (f"{tmp_path}/{name}.tsv:2: {expected}",)


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0\r", exclude_categories=["Cs"]), max_size=12)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=6))
def test_cells_are_those_of_pythons_reader(tmp_path_factory, cells):
    path = tmp_path_factory.mktemp("tables") / "table.tsv"
    write_table(path, [{"index": str(number), "one": one, "other": other} for number, (one, other) in enumerate(cells)])
    _, rows = read_table(str(path), ["index"])
    with path.open(encoding="utf-8", newline="") as stream:
        expected = list(csv.DictReader(stream, delimiter="\t"))
    assert [dict(row.texts) for row in rows] == [{name: text for name, text in row.items() if text} for row in expected]


def test_lines_quotes_and_line_ends(tmp_path):
    path = tmp_path / "table.tsv"
    path.write_bytes(('\ufeffindex\tquestion\r\n\r\n1\t"two\r\nlines, ""and"" quotes"\r\n'
                      '2\t3" wide\r\n3\ta b\n4\tNone').encode())
    _, rows = read_table(str(path), ["index"])
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
    _, rows = read_table(path, ["index", "image"])
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
