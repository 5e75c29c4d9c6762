"""The published benchmarks: OpenCompass's TSV files, and the prompt of each question.

The files can have gigabytes, nearly all of which are base64 images.  So one pass over a file keeps the texts and the
place of each record; an image is read when it is needed.

The words of the prompts are VLMEvalKit's at commit e8e78f0 of August 2026, because scores can only be compared for the
same prompts.  It has two sets: its default, with which Qwen2.5-VL is measured there (pull request 786), and one written
for Qwen2-VL, which MindSpeed-MM uses as ``use_custom_prompt``.
"""

import ast
import base64
import binascii
import csv
import re
import string
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from mm.config.evaluate import BenchmarkName, Rule
from mm.data.records.roots import MediaRoots
from mm.data.sample import Image, Inline, Media, Sample, Turn
from mm.errors import MAX_PROBLEMS, UserError, collected, counted, nearest, refuse

IMAGE = "image"
"""The column with images."""
_LONGEST_INDEX = 64
"""Characters: an image cell up to this length is the index of another row, whose images are used (VLMEvalKit)."""
_ADDRESS = re.compile("data:image/[a-z+.-]+;base64,")
"""Prefix that browsers write before base64."""


class _Place(NamedTuple):
    """A record of a file."""

    path: str
    line: int
    start: int
    """First byte."""
    num_bytes: int


class Cell(NamedTuple):
    """An image in a cell, which is read when it is needed."""

    place: _Place
    column: int
    number: int
    """Index among the images of the cell."""

    @property
    def image(self) -> Inline:
        return Inline(f"{self.place.path}:{self.place.line}: image {self.number + 1} of column {IMAGE!r}", self)

    def read(self) -> bytes:
        """The bytes of the image file.  Raises UserError if the cell is not base64."""
        with open(self.place.path, "rb") as stream:
            stream.seek(self.place.start)
            (cells,) = _reader([stream.read(self.place.num_bytes).decode()])
        try:
            return base64.b64decode("".join(_images(cells[self.column])[self.number].split()), validate=True)
        except (binascii.Error, IndexError) as error:
            raise UserError(f"{self.image.name}: is not base64 ({error}); encode the bytes of an image file as base64."
                            ) from error


@dataclass(frozen=True)
class TsvRow:
    """One record: its non-empty texts by column, and its images."""

    line: int
    texts: Mapping[str, str]
    images: tuple[Inline, ...] = ()


def read_table(path: str, needed: Sequence[str]) -> tuple[tuple[str, ...], list[TsvRow]]:
    """The columns of a file, with at least ``needed``, and its rows.  Raises UserError with all problems."""
    rows: dict[str, TsvRow] = {}
    problems: list[str] = []
    columns: tuple[str, ...] = ()
    for place, cells in _records(path):
        where = f"{path}:{place.line}: "
        if not columns:
            columns = tuple(cells)
            refuse(f"{where}has no column {name!r}{nearest(name, columns)}; its columns are "
                   f"{', '.join(map(repr, columns))}, separated by tabs." for name in needed if name not in columns)
            continue
        with collected(problems, where):
            row = _row(columns, place, cells)
            if row.texts["index"] in rows:
                raise UserError(f"has the same index {row.texts['index']!r} as line {rows[row.texts['index']].line}.")
            rows[row.texts["index"]] = row
        if len(problems) >= MAX_PROBLEMS:
            break
    refuse(problems)
    if not columns:
        raise UserError(f"{path}: is empty; expected a TSV file of OpenCompass.")
    found = list[TsvRow]()
    for row in rows.values():
        with collected(problems, f"{path}:{row.line}: "):
            found.append(_with_images(row, rows))
    refuse(problems[:MAX_PROBLEMS])
    return columns, found


def _reader(lines: Iterable[str]) -> Iterator[list[str]]:
    csv.field_size_limit(sys.maxsize)
    return csv.reader(lines, delimiter="\t", strict=True)


def _records(path: str) -> Iterator[tuple[_Place, list[str]]]:
    """The cells of each record, with its place; empty lines are skipped."""
    start = end = line = 0
    first_line = 1

    def lines(raw_lines: Iterable[bytes]) -> Iterator[str]:
        nonlocal end, line
        for raw in raw_lines:
            text = raw.decode("utf-8" if end else "utf-8-sig")
            end, line = end + len(raw), line + 1
            yield text

    try:
        with open(path, "rb") as stream:
            for cells in _reader(lines(stream)):
                if cells:
                    yield _Place(path, first_line, start, end - start), cells
                start, first_line = end, line + 1
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}:{first_line}: a record begins here that is not TSV in UTF-8 ({error})."
                        ) from error


def _row(columns: Sequence[str], place: _Place, cells: Sequence[str]) -> TsvRow:
    """One record; an image cell that refers to another row is still a text."""
    if len(cells) != len(columns):
        raise UserError(f"has {len(cells)} cells, but the first line has {len(columns)} columns; tabs separate cells, "
                        f"and a cell that contains a tab or a line break needs quotes.")
    texts = {name: cell for name, cell in zip(columns, cells, strict=True) if cell}
    if "index" not in texts:
        raise UserError("has no index; give each row a unique one.")
    if len(texts.get(IMAGE, "")) <= _LONGEST_INDEX:
        return TsvRow(place.line, texts)
    images = range(len(_images(texts.pop(IMAGE))))
    return TsvRow(place.line, texts, tuple(Cell(place, columns.index(IMAGE), number).image for number in images))


def listed(cell: str) -> tuple[str, ...]:
    """The texts in one cell, such as several right answers: a Python list, or a single text."""
    text = cell.strip()
    if text.startswith("[") and text.endswith("]"):
        try:
            found = ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # a text in brackets
            return (cell,)
        if isinstance(found, list) and found:
            return tuple(str(one) for one in found)
    return (cell,)


def _images(cell: str) -> list[str]:
    """The base64 texts in an image cell: a Python list, or a single one."""
    cell = _ADDRESS.sub("", cell).strip()
    if cell[:1] + cell[-1:] != "[]":
        return [cell]
    return [one.strip().strip("'\"") for one in cell[1:-1].split(",")]  # base64 has neither commas nor quotes


def _with_images(row: TsvRow, rows: Mapping[str, TsvRow]) -> TsvRow:
    """``row`` with its own images, or those of the row that its image cell refers to, directly or through others."""
    named, seen = row, set[str]()
    while IMAGE in named.texts:
        index = named.texts[IMAGE]
        if index not in rows or index in seen:
            raise UserError(f"column {IMAGE!r} is {row.texts[IMAGE]!r}; expected the base64 of an image file, or the "
                            f"index of another row with one.")
        seen.add(index)
        named = rows[index]
    texts = {name: text for name, text in row.texts.items() if name != IMAGE}
    return replace(row, texts=texts, images=named.images)


Form = Literal["options", "interleaved options", "few words"]
"""A question with options, one with options and ``<image 1>`` in its text, and one answered in a few words."""

_SELECT = "Please select the correct answer from the options above."
_SELECT_CHINESE = "请直接回答选项字母。"
_CHINESE = re.compile("[\u4e00-\u9fff]")
_SINGLE_WORD = "\nAnswer the question using a single word or phrase."
_SHORT_WORDS = "\nPlease try to answer the question with short words or phrases if possible."
_PLACEHOLDER = re.compile("<image ([1-9])>")

QuestionText = tuple[str | int, ...]
"""Texts, and between them the indices of images."""


def prompt(
    form: Form, custom: bool, question: str, hint: str, options: Mapping[str, str], num_images: int
) -> QuestionText:
    """The prompt of a question; with ``custom`` in the words written for Qwen2-VL."""
    images = tuple(range(num_images))
    match form, custom:
        case "few words", _:
            return *images, question + (_SHORT_WORDS if custom else _SINGLE_WORD)
        case _, False:
            text = _listed(question, hint, options) + (f"{_SELECT} \n" if options else "")
            return placed(text, num_images) if form == "interleaved options" else (*images, text)
        case "options", True:
            text = _listed(question, hint, options)
            ending = _SELECT_CHINESE if _CHINESE.search(text) else _SELECT
            return *images, (text + (ending if options else "")).rstrip()
        case _:
            return *images, (_listed(question, hint, options) + (_SELECT if options else "")).rstrip()


def _listed(question: str, hint: str, options: Mapping[str, str]) -> str:
    lines = [f"Hint: {hint}"] * bool(hint) + [f"Question: {question}"] + ["Options:"] * bool(options)
    return "".join(f"{line}\n" for line in (*lines, *(f"{letter}. {text}" for letter, text in options.items())))


def placed(text: str, num_images: int) -> QuestionText:
    """``text`` with images where ``<image 1>`` and so on stand; if none is named, all come first."""
    assert max_placeholder(text) <= num_images, "checked when the file was read"
    pieces = _PLACEHOLDER.split(text)
    if len(pieces) == 1:
        return *range(num_images), text
    items = [int(piece) - 1 if number % 2 else piece for number, piece in enumerate(pieces)]
    return tuple(item for item in items if item != "")


def max_placeholder(text: str) -> int:
    """The highest number of an image that ``text`` names, counted from 1; 0 if it names none."""
    return max(map(int, _PLACEHOLDER.findall(text)), default=0)


GROUPS = ("split", "l2-category", "category")
"""Columns by which scores are also broken down, as in VLMEvalKit."""
_PATHS = "image_path"
"""The column with paths of images, used in a file without the column ``IMAGE``."""


@dataclass(frozen=True)
class Benchmark:
    """A published benchmark."""

    name: BenchmarkName
    title: str
    rule: Rule
    form: Form
    headline_split: str | None = None
    """The split that publications report; None: the whole file."""


BENCHMARKS: Mapping[BenchmarkName, Benchmark] = {one.name: one for one in (
    Benchmark("ai2d", "AI2D", "choice", "options"),
    Benchmark("chartqa", "ChartQA", "relaxed", "few words"),
    Benchmark("docvqa", "DocVQA", "anls", "few words"),
    Benchmark("mmmu", "MMMU", "choice", "interleaved options", "validation"),
)}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One question of a file, ready to be asked, and its right answers."""

    index: str
    """Unique in its file."""
    where: str
    """``file:line``; for the user's own questions also the question's number."""
    question: str
    """The question's text in the file, for people."""
    content: tuple[str | Media, ...]
    """The last turn of the prompt."""
    right: tuple[str, ...]
    """Each of these answers is right; letters if there are options."""
    options: Mapping[str, str]
    groups: Mapping[str, str]
    """Its values in the columns ``GROUPS``, where it has any."""
    earlier: tuple[Turn, ...] = ()
    """Earlier turns."""

    @property
    def sample(self) -> Sample:
        """The prompt."""
        return Sample((*self.earlier, Turn("user", self.content)), self.where)


@dataclass(frozen=True)
class Items:
    """All questions of a file."""

    rule: Rule
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()
    headline_split: str | None = None


def read_benchmark(path: str, benchmark: Benchmark, custom_prompt: bool, media_roots: tuple[str, ...] = ()) -> Items:
    """Read the TSV file of a benchmark.  Raises UserError with everything in it that cannot be asked or scored."""
    needed = ("index", "question", "answer", *(("A", "B") if benchmark.rule == "choice" else ()))
    columns, rows = read_table(path, needed)
    if IMAGE not in columns and _PATHS not in columns:
        raise UserError(f"{path}:1: has neither a column {IMAGE!r} (images as base64) nor {_PATHS!r} (their paths).")
    problems: list[str] = []
    items: list[Item] = []
    num_without, roots = 0, MediaRoots.beside(path, media_roots)
    for row in rows:
        with collected(problems, f"{path}:{row.line}: "):
            images = tuple(map(Image, row.images))
            if IMAGE not in columns and _PATHS in row.texts:
                images = tuple(Image(roots.find(one, Image.kind)) for one in listed(row.texts[_PATHS]))
            num_without += not images
            if images:
                items.append(_item(path, row, images, benchmark, custom_prompt))
    refuse(problems)
    if not items:
        raise UserError(f"{path}: has no rows with an image; there is nothing to ask.")
    notes = [f"{path}: {counted(num_without, 'row')} without an image left out, as in VLMEvalKit"]
    return Items(benchmark.rule, tuple(items), tuple(notes if num_without else ()), benchmark.headline_split)


def _item(path: str, row: TsvRow, images: tuple[Image, ...], benchmark: Benchmark, custom: bool) -> Item:
    options = {letter: row.texts[letter] for letter in string.ascii_uppercase if letter in row.texts}
    is_open = benchmark.form == "interleaved options" and "A" not in options
    has_options = benchmark.rule == "choice" and not is_open
    refuse(_problems(row, options if has_options else None, benchmark, len(images)))
    question = row.texts["question"]
    asked = prompt(benchmark.form, custom, question, row.texts.get("hint", ""), options, len(images))
    return Item(
        row.texts["index"], f"{path}:{row.line}", question,
        tuple(item if isinstance(item, str) else images[item] for item in asked), listed(row.texts["answer"]),
        options if has_options else {}, {name: row.texts[name] for name in GROUPS if name in row.texts})


def _problems(
    row: TsvRow, options: Mapping[str, str] | None, benchmark: Benchmark, num_images: int
) -> Iterator[str]:
    """``options``: None for a question without."""
    question, answer = row.texts.get("question", ""), row.texts.get("answer")
    if not question:
        yield "column 'question' is empty; expected a question."
    if answer is None:
        yield "column 'answer' is empty, so it cannot be scored; use a split with published answers (validation)."
    elif options is not None and (len(options) < 2 or answer not in options):
        yield f"column 'answer' is {answer!r}; expected the letter of one of several options: {', '.join(options)}."
    if benchmark.form == "interleaved options":
        most = max_placeholder(" ".join((question, *(options or {}).values())))
        if most > num_images:
            yield f"refers to <image {most}>, but has {counted(num_images, 'image')} in column {IMAGE!r}."
