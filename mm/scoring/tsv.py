"""OpenCompass's benchmark files: tab-separated tables with images as base64, which stay on disk.

The files can have gigabytes, nearly all of which are images.  So one pass over the file keeps the texts and the place
of each record; an image is read when it is needed.
"""

import ast
import base64
import binascii
import csv
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mm.data.sample import Inline
from mm.errors import MAX_PROBLEMS, UserError, collected, nearest, refuse

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


class Cell(Inline):
    """An image in a cell, which is read when it is needed."""

    place: _Place
    column: int
    number: int
    """Index among the images of the cell."""

    def __init__(self, place: _Place, column: int, number: int) -> None:
        name = f"{place.path}:{place.line}: image {number + 1} of column {IMAGE!r}"
        self.__dict__.update(name=name, place=place, column=column, number=number)  # the base is frozen

    @property
    def content(self) -> bytes:
        """The bytes of the image file.  Raises UserError if the cell is not base64."""
        with open(self.place.path, "rb") as stream:
            stream.seek(self.place.start)
            (cells,) = _reader([stream.read(self.place.num_bytes).decode()])
        try:
            return base64.b64decode("".join(_images(cells[self.column])[self.number].split()), validate=True)
        except (binascii.Error, IndexError) as error:
            raise UserError(f"{self.name}: is not base64 ({error}); encode the bytes of an image file as base64."
                            ) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cell) and (self.place, self.number) == (other.place, other.number)

    def __hash__(self) -> int:
        return hash((self.place, self.number))


@dataclass(frozen=True)
class TsvRow:
    """One record: its non-empty texts by column, and its images."""

    line: int
    texts: Mapping[str, str]
    images: tuple[Cell, ...] = ()


@dataclass(frozen=True)
class TsvTable:
    """A whole file."""

    columns: tuple[str, ...]
    rows: tuple[TsvRow, ...]


def read_table(path: str, needed: Sequence[str]) -> TsvTable:
    """Read all texts of a file with at least the columns ``needed``.

    Raises UserError with all problems: records of another length, double or missing indices, and references to rows
    without an image.
    """
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
    found = []
    for row in rows.values():
        with collected(problems, f"{path}:{row.line}: "):
            found.append(_with_images(row, rows))
    refuse(problems[:MAX_PROBLEMS])
    return TsvTable(columns, tuple(found))


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
    return TsvRow(place.line, texts, tuple(Cell(place, columns.index(IMAGE), number) for number in images))


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
