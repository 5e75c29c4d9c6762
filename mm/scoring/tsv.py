"""OpenCompass's benchmark files: tab-separated tables with images as base64, which stay on disk.

The files can have gigabytes, nearly all of which are images.  So one pass over the file locates each cell and keeps the
texts; an image is read when it is needed.
"""

import ast
import base64
import binascii
import mmap
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mm.data.media.picture import image_size
from mm.data.read.spans import UTF8_MARK, not_utf8
from mm.data.sample import Inline
from mm.errors import MAX_PROBLEMS, UserError, collected, nearest, refuse, refuse_special
from mm.files import write_whole

IMAGE = "image"
"""The column with images."""
_LONGEST_INDEX = 64
"""Characters: an image cell up to this length is the index of another row, whose images are used (VLMEvalKit)."""
_QUOTED = re.compile(rb'"([^"]*(?:""[^"]*)*)"(.*)', re.DOTALL)
_ADDRESS = re.compile(rb"data:image/[a-z+.-]+;base64,")
"""Prefix that browsers write before base64."""

CellSpan = tuple[int, int]
"""First byte and end of a cell, including quotes."""


@dataclass(frozen=True)
class Cell:
    """An image inside a file."""

    path: str
    line: int
    span: CellSpan
    number: int
    """Index among the images of the cell."""

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}: image {self.number + 1} of column {IMAGE!r}"

    def content(self) -> bytes:
        """The bytes of the image file.  Raises UserError if the cell is no longer base64."""
        with open(self.path, "rb") as stream:
            stream.seek(self.span[0])
            images = _images(stream.read(self.span[1] - self.span[0]))
        return _decoded(images[self.number] if self.number < len(images) else b"", self.where)

    def write(self, folder: Path) -> str:
        """Write the image file to ``folder``, unless it is there.  Returns its path, named after its bytes."""
        content = self.content()
        path = folder / f"{zlib.crc32(content):08x}-{len(content)}"
        if not path.exists():
            write_whole(path, content)
        return str(path)


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
    """Read a file with the columns ``needed`` (and others) and a unique index in each row.

    Empty cells are left out; all others are taken literally.  Raises UserError with the problems of all rows: a number
    of cells that differs from the columns, text that is not UTF-8, a reference to the images of a missing row, or
    base64 whose header is not that of an image.
    """
    problems: list[str] = []
    columns: tuple[str, ...] = ()
    rows: dict[str, TsvRow] = {}
    with _mapped(path) as data:
        for line, cells in _records(path, data):
            if not columns:
                columns = _columns(path, [_text(path, line, data, cell) for cell in cells], needed)
                continue
            with collected(problems):
                row = _row(path, columns, line, cells, data)
                index = row.texts["index"]
                if index in rows:
                    raise UserError(f"{path}:{line}: has the same index {index!r} as line {rows[index].line}; expected "
                                    f"unique indices.")
                rows[index] = row
            if len(problems) >= MAX_PROBLEMS:
                raise UserError([*problems, f"{path}: reading stopped at line {line}; more problems may follow."])
    refuse(problems)
    found = []
    for row in rows.values():
        with collected(problems):
            found.append(_with_images(path, row, rows))
    refuse(problems[:MAX_PROBLEMS])
    return TsvTable(columns, tuple(found))


def _mapped(path: str) -> mmap.mmap:
    refuse_special(Path(path))
    try:
        with open(path, "rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a TSV file of OpenCompass.") from error
    except ValueError as error:  # nothing can be mapped
        raise UserError(f"{path}: is empty; expected a TSV file of OpenCompass.") from error


def _records(path: str, data: mmap.mmap) -> Iterator[tuple[int, list[CellSpan]]]:
    """For each record the line where it begins, and its cells; empty lines are skipped."""
    size = len(data)
    position, line = len(UTF8_MARK) if data[: len(UTF8_MARK)] == UTF8_MARK else 0, 1
    newline = -1  # the first at or after ``position``, if it is not before it
    while position < size:
        first_line, cells = line, list[CellSpan]()
        while True:
            start, end = position, position
            if data[start : start + 1] == b'"':
                end = _closing_quote(path, line, data, start) + 1
                line += data[start:end].count(b"\n")
            if newline < end:
                newline = data.find(b"\n", end)
                newline = size if newline < 0 else newline
            tab = data.find(b"\t", end, newline)
            end = newline if tab < 0 else tab
            cells.append((start, end))
            position = min(end + 1, size)
            if tab < 0:
                break
        line += 1
        last, end = cells[-1]
        if end > last and data[end - 1 : end] == b"\r":
            cells[-1] = (last, end - 1)
        if len(cells) > 1 or cells[0][1] > cells[0][0]:
            yield first_line, cells


def _closing_quote(path: str, line: int, data: mmap.mmap, start: int) -> int:
    """Position of the quote that ends a cell; two quotes stand for one inside the cell."""
    position = start + 1
    while True:
        position = data.find(b'"', position)
        if position < 0:
            raise UserError(f"{path}:{line}: a cell starts with a quote here that is never closed; double the quotes "
                            f"inside cells, and add one at the end.")
        if data[position + 1 : position + 2] != b'"':
            return position
        position += 2


def _text(path: str, line: int, data: mmap.mmap, span: CellSpan) -> str:
    try:
        return _unquoted(data[span[0] : span[1]]).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{line}: {not_utf8(error)}") from error


def _unquoted(raw: bytes) -> bytes:
    """The content of a cell; text after its closing quote belongs to it, as in pandas."""
    match = _QUOTED.fullmatch(raw)
    return match[1].replace(b'""', b'"') + match[2] if match else raw


def _columns(path: str, names: Sequence[str], needed: Sequence[str]) -> tuple[str, ...]:
    refuse(f"{path}:1: has the column {name!r} twice; expected unique names." for name in dict.fromkeys(names)
           if names.count(name) > 1)
    advice = "; rename the right column, or use OpenCompass's file of this benchmark"
    refuse(f"{path}:1: has no column {name!r}{near}; its columns are {', '.join(map(repr, names))}, separated by tabs"
           f"{'' if near else advice}." for name in needed if name not in names for near in [nearest(name, names)])
    return tuple(names)


def _row(
    path: str, columns: Sequence[str], line: int, cells: Sequence[CellSpan], data: mmap.mmap
) -> TsvRow:
    """One record; an image cell that refers to another row is still a text."""
    if len(cells) != len(columns):
        raise UserError(f"{path}:{line}: has {len(cells)} cells, but the first line has {len(columns)} columns; tabs "
                        f"separate cells, and a cell that contains a tab or a line break needs quotes.")
    spans = {name: span for name, span in zip(columns, cells, strict=True) if span[1] > span[0]}
    start, end = image_span = spans.get(IMAGE, (0, 0))
    holds_images = end - start > _LONGEST_INDEX
    texts = {name: _text(path, line, data, span) for name, span in spans.items()
             if not (name == IMAGE and holds_images)}
    if "index" not in texts:
        raise UserError(f"{path}:{line}: has no index; give each row a unique one.")
    if not holds_images:
        return TsvRow(line, texts)
    encoded = _images(data[start:end])
    images = tuple(Cell(path, line, image_span, number) for number in range(len(encoded)))
    for cell, text in zip(images, encoded, strict=True):
        image_size(Inline(cell.where, _decoded(text, cell.where)))
    return TsvRow(line, texts, images)


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


def _images(raw: bytes) -> list[bytes]:
    """The base64 texts in an image cell: a Python list, or a single one."""
    raw = _ADDRESS.sub(b"", _unquoted(raw)).strip()
    if raw[:1] + raw[-1:] != b"[]":
        return [raw]
    return [one.strip().strip(b"'\"") for one in raw[1:-1].split(b",")]  # base64 has neither commas nor quotes


def _decoded(encoded: bytes, where: str) -> bytes:
    try:
        content = base64.b64decode(b"".join(encoded.split()), validate=True)
    except binascii.Error as error:
        raise UserError(f"{where}: is not base64 ({error}), starting with {encoded[:24]!r}; encode the bytes of an "
                        f"image file as base64.") from error
    if not content:
        raise UserError(f"{where}: is empty; encode the bytes of an image file as base64.")
    return content


def _with_images(path: str, row: TsvRow, rows: Mapping[str, TsvRow]) -> TsvRow:
    """``row`` with its own images, or those of the row that its image cell refers to, directly or through others."""
    named, seen = row, {row.texts["index"]}
    while IMAGE in named.texts:
        index = named.texts[IMAGE]
        if index not in rows or index in seen:
            what = "leads to no image" if named is not row or index in rows else "is not an index of this file"
            raise UserError(f"{path}:{row.line}: column {IMAGE!r} is {row.texts[IMAGE]!r}, which {what}; expected the "
                            f"base64 of an image file, or the index of another row with one.")
        seen.add(index)
        named = rows[index]
    return TsvRow(row.line, {name: text for name, text in row.texts.items() if name != IMAGE}, named.images)
