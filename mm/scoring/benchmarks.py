"""The benchmarks known by name, and their TSV files as items.

The prompt for a question of a benchmark, from its text, options and number of images.

The words are VLMEvalKit's at commit e8e78f0 of August 2026, because scores can only be compared for the same prompts.
It has two sets: its default, with which Qwen2.5-VL is measured there (pull request 786), and one written for Qwen2-VL,
which MindSpeed-MM uses as ``use_custom_prompt``.
"""

import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from mm.config.evaluate import BenchmarkName, Rule
from mm.data.records.roots import MediaRoots
from mm.data.sample import Image, Media, Sample, Turn
from mm.errors import UserError, collected, counted, refuse
from mm.scoring.tsv import IMAGE, TsvRow, listed, read_table

Form = Literal["options", "marked options", "few words"]
"""A question with options, one with options and ``<image 1>`` in its text, and one answered in a few words."""

_SELECT = "Please select the correct answer from the options above."
_SELECT_CHINESE = "请直接回答选项字母。"
_CHINESE = re.compile("[\u4e00-\u9fff]")
_SINGLE_WORD = "\nAnswer the question using a single word or phrase."
_SHORT_WORDS = "\nPlease try to answer the question with short words or phrases if possible."
_MARK = re.compile("<image ([1-9])>")

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
            return placed(text, num_images) if form == "marked options" else (*images, text)
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
    """``text`` with the images in the places of ``<image 1>`` and so on; without such a mark all images come first.

    An image appears as often as it is named; one that is not named is left out.
    """
    assert max_mark(text) <= num_images, "checked when the file was read"
    pieces = _MARK.split(text)
    if len(pieces) == 1:
        return *range(num_images), text
    items = [int(piece) - 1 if number % 2 else piece for number, piece in enumerate(pieces)]
    return tuple(item for item in items if item != "")


def max_mark(text: str) -> int:
    """The highest number of an image that ``text`` names, counted from 1; 0 if it names none."""
    return max(map(int, _MARK.findall(text)), default=0)


GROUPS = ("split", "l2-category", "category")
"""Columns by which scores are also broken down, as in VLMEvalKit."""
_PATHS = "image_path"
"""The column with paths of images, used in a file without the column ``IMAGE``."""


@dataclass(frozen=True)
class Benchmark:
    """A published benchmark.  ``mm.scoring.benchmarks`` and ``mm.scoring.rules`` define how it is asked and scored."""

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
    Benchmark("mmmu", "MMMU", "choice", "marked options", "validation"),
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
    table = read_table(path, needed)
    if IMAGE not in table.columns and _PATHS not in table.columns:
        raise UserError(f"{path}:1: has neither a column {IMAGE!r} (images as base64) nor {_PATHS!r} (their paths).")
    problems: list[str] = []
    items: list[Item] = []
    num_without, roots = 0, MediaRoots.beside(path, media_roots)
    for row in table.rows:
        with collected(problems, f"{path}:{row.line}: "):
            images = tuple(map(Image, row.images))
            if IMAGE not in table.columns and _PATHS in row.texts:
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
    is_open = benchmark.form == "marked options" and "A" not in options
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
    if benchmark.form == "marked options":
        most = max_mark(" ".join((question, *(options or {}).values())))
        if most > num_images:
            yield f"refers to <image {most}>, but has {counted(num_images, 'image')} in column {IMAGE!r}."
