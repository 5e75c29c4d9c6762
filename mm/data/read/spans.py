"""The positions of the records of a JSON list or a JSONL file, found in one pass with part of the file in memory.

Each character of the text stands for one byte: JSON's syntax is ASCII, and strings are not interpreted.  Whether a
record is valid UTF-8 is checked later.
"""

import json
import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from mm.data.record_name import numbered, wrong_character
from mm.errors import UserError

BLOCK_BYTES = 1 << 18
"""About this much of a file is read and passed on at a time: a few hundred records, a fraction of a second of work."""
MAX_RECORD_BYTES = 1 << 26
"""Longer records are refused: an unterminated string would be read to the end of the file."""
UTF8_MARK = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\r\n]*")
_LONGEST_WORD = 16
"""Characters: longer than what is invalid only because the window ends in it, a word, an escape or an exponent."""

ByteSpan = tuple[int, int]
"""First byte and end of a record in its file."""
FoundRecords = tuple[int, int, list[ByteSpan]]
"""Line and column of the first of several consecutive records, and the spans of all."""


class _Window:
    """The part of a file that is in memory."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.text, self.offset, self.is_end = "", 0, False
        self._line, self._column = 1, 1
        """The position of the text in the file."""
        while len(self.text) < len(UTF8_MARK) and not self.is_end:
            self.grow()
        if self.text.startswith(UTF8_MARK.decode("latin-1")):
            self.drop(len(UTF8_MARK))
            self._column = 1

    def grow(self) -> None:
        """Read on, doubling the window, so that a long record is not scanned too often."""
        more = self._stream.read(max(BLOCK_BYTES, len(self.text)))
        self.is_end = not more
        self.text += more.decode("latin-1")

    def drop(self, position: int) -> None:
        """Discard everything before ``position``."""
        self._line, self._column = self.place(position)
        self.offset += position
        self.text = self.text[position:]

    def skip_space(self, position: int) -> bool:
        """Discard everything before ``position`` and the whitespace after it; returns whether anything follows."""
        while (position := _skip(self.text, position)) == len(self.text) and not self.is_end:
            self.drop(position)
            self.grow()
            position = 0
        self.drop(position)
        return bool(self.text)

    def place(self, position: int) -> tuple[int, int]:
        """Line and column in the file, in characters, counted from 1."""
        newline = self.text.rfind("\n", 0, position)
        before = num_characters(self.text[newline + 1 : position].encode("latin-1"))
        return (self._line + self.text.count("\n", 0, position), before + (1 if newline >= 0 else self._column))

    def where(self, path: str, position: int) -> str:
        """``file:line:column``."""
        line, column = self.place(position)
        return f"{path}:{line}:{column}"

    def span(self, start: int, end: int) -> ByteSpan:
        return self.offset + start, self.offset + end

    def is_too_long(self) -> bool:
        return len(self.text) > MAX_RECORD_BYTES


def line_spans(stream: BinaryIO, path: str, problems: list[str]) -> Iterator[FoundRecords]:
    """The non-blank lines."""
    window, num_found = _Window(stream), 0
    while window.text or not window.is_end:
        end = len(window.text) if window.is_end else window.text.rfind("\n") + 1
        if not end:
            if window.is_too_long():
                problems.append(_too_long(window, 0, path, num_found))
                return
            window.grow()
            continue
        spans, start, first = [], 0, 0
        for line in window.text[:end].split("\n"):
            if content := line.strip(" \t\r"):
                begin = start + line.index(content[0])
                first = first if spans else begin
                spans.append(window.span(begin, begin + len(content)))
            start += len(line) + 1
        if spans:
            yield *window.place(first), spans
        num_found += len(spans)
        window.drop(end)
        window.grow()


def list_spans(stream: BinaryIO, path: str, problems: list[str]) -> Iterator[FoundRecords]:
    """The elements of a list.  Repeated keys, ``NaN`` and invalid UTF-8 are not detected here."""
    window, decoder, position = _Window(stream), json.JSONDecoder(), 0
    window.skip_space(0)
    window.skip_space(1)  # after the bracket
    place, spans, num_found, is_last = (0, 0), [], 0, window.text.startswith("]")
    while not is_last:
        try:
            found = _element(window, decoder, position, path, num_found)
        except UserError as error:
            problems += error.problems
            break
        if found is None:
            if window.is_too_long():
                problems.append(_too_long(window, position, path, num_found))
                break
            if spans:
                yield *place, spans
                spans = []
            window.drop(position)
            window.grow()
            position = 0
            continue
        place = place if spans else window.place(found.start)
        spans.append(window.span(found.start, found.end))
        num_found, position, is_last = num_found + 1, found.next, found.is_last
    if spans:
        yield *place, spans
    if is_last and window.skip_space(position + 1):
        problems.append(_no_list(window, 0, path, num_found))


class _Element(NamedTuple):
    """One element of a list, as positions in the window."""

    start: int
    end: int
    """After its last character."""
    next: int
    """Position of the next element, or of the final bracket."""
    is_last: bool
    """Whether the bracket is next."""


def _element(
    window: _Window, decoder: json.JSONDecoder, position: int, path: str, number: int
) -> _Element | None:
    """The element ``number``, which starts at ``position`` or after the whitespace there.

    In ``{"a": 1} , {"b": 2}]`` the first element has ``start`` 0, ``end`` 8 and ``next`` 11, where the second starts.
    Only the text after an element shows that the window does not cut it.  Returns None if the window ends before that
    is known, so it must grow.  Raises UserError if this is not a list.
    """
    text, is_end = window.text, window.is_end
    start = _skip(text, position)
    if start == len(text):
        if is_end:
            raise UserError(f"{window.where(path, start)}: the list has no final ']' {_after(number)}; the file may "
                            f"be truncated.")
        return None
    try:
        _, end = decoder.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        if not is_end and _may_go_on(error, len(text)):
            return None
        raise UserError(_syntax_problem(window, start, error, path, number)) from error
    comma = _skip(text, end)
    if text.startswith("]", comma):
        return _Element(start, end, comma, is_last=True)
    following = _skip(text, comma + 1)
    is_truncated = following >= len(text) or (not text.startswith(",", comma) and len(text) - end < _LONGEST_WORD)
    if is_truncated and not is_end:  # the number may continue: the window may contain 1e of 1e5
        return None
    if not text.startswith(",", comma) or text.startswith("]", following):
        raise UserError(_no_list(window, comma, path, number + 1))
    return _Element(start, end, following, is_last=False)


def _may_go_on(error: Exception, length: int) -> bool:
    """Whether the error in a text of this length may only mean that the text is cut."""
    return isinstance(error, json.JSONDecodeError) and (
        error.msg.startswith("Unterminated string") or error.pos >= length - _LONGEST_WORD)


def _no_list(window: _Window, position: int, path: str, num_found: int) -> str:
    found = repr(_shown(window.text[position : position + 20])) if position < len(window.text) else (
        "the end of the file")
    return (f"{window.where(path, position)}: expected ',' and an object, or the list's ']' and the end of the "
            f"file, {_after(num_found)}; found {found}.")


def _after(num_found: int) -> str:
    return f"after {numbered('record', num_found - 1)}" if num_found else "and no record"


def _syntax_problem(window: _Window, start: int, error: Exception, path: str, number: int) -> str:
    """The error in the element ``number``, which starts at ``start``."""
    which = numbered("record", number)
    if not isinstance(error, json.JSONDecodeError):
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error  # a number of 4300 digits
        return f"{window.where(path, start)}: {which}: not valid JSON: {why}."
    raw = window.text[start : error.pos + _LONGEST_WORD].encode("latin-1")
    try:
        raw.decode()
    except UnicodeDecodeError as wrong:
        if wrong.end < len(raw):  # otherwise a character was cut
            return f"{window.where(path, start + wrong.start)}: {which}: {not_utf8(wrong)}"
    found = wrong_character(_shown(window.text[error.pos : error.pos + 4]), 0)
    is_truncated = window.is_end and _may_go_on(error, len(window.text))
    hint = "; the file ends within this record and may be truncated" if is_truncated else ""
    return f"{window.where(path, error.pos)}: {which}: not valid JSON: {error.msg}, {found}{hint}."


def num_characters(raw: bytes) -> int:
    """Number of UTF-8 characters; an invalid byte counts as one."""
    return len(raw.decode(errors="replace"))


def not_utf8(error: UnicodeDecodeError) -> str:
    """The message for a text in another encoding."""
    return (f"byte {error.object[error.start]:#04x} is not UTF-8; convert the file, for example with 'iconv -f GBK -t "
            f"UTF-8'.")


def _too_long(window: _Window, position: int, path: str, number: int) -> str:
    return (f"{window.where(path, position)}: {numbered('record', number)} starts here and does not end within "
            f"{MAX_RECORD_BYTES >> 20} MiB; is a string or an object not closed?")


def _shown(text: str) -> str:
    return text.encode("latin-1").decode(errors="replace")


def _skip(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    assert space is not None, "no space matches too"
    return space.end()
