"""The raw values of a JSON or JSONL file and where each lies in it, so that one can be read again alone."""

import codecs
import json
import os
import re
from collections.abc import Iterator
from typing import IO, Any

from mm.errors import UserError

_SPACE = re.compile(r"[ \t\r\n]*")

Version = tuple[int, int]
"""Size in bytes and time of the last change in ns: another version has other contents."""


def _version(stream: IO[bytes]) -> Version:
    status = os.fstat(stream.fileno())
    return status.st_size, status.st_mtime_ns


def read_record(path: str, version: Version, start: int, end: int) -> Any:
    """The JSON value in bytes [start, end) of ``path``.

    Raises UserError when the file is no longer the ``version`` that was checked.
    """
    try:
        with open(path, "rb") as stream:
            found = _version(stream)
            stream.seek(start)
            raw = stream.read(end - start)
    except OSError as error:
        raise UserError(f"{path}: can no longer be read: {error.strerror}.") from error
    if found != version:
        raise UserError(
            f"{path}: was changed after this run had checked it; start the run again, and write changed data to a new "
            f"file."
        )
    return json.loads(raw)


def line_of(path: str, position: int) -> int:
    """Line of a byte of the file, from 1."""
    with open(path, "rb") as stream:
        return stream.read(position).count(b"\n") + 1


class RecordFile:
    """One dataset file in memory, to be checked."""

    def __init__(self, path: str) -> None:
        """Raises UserError when ``path`` is no readable regular file in UTF-8 (a byte-order mark is fine)."""
        if not os.path.isfile(path):
            raise UserError(f"{path}: is no regular file; name JSON or JSONL files in basic_parameters.dataset.")
        try:
            with open(path, "rb") as stream:
                self.version = _version(stream)
                raw = stream.read()
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
        self.path = path
        self._mark_bytes = len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0
        try:
            self.text = raw[self._mark_bytes :].decode()
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, self._mark_bytes + error.start) + 1
            raise UserError(
                f"{path}:{line}: byte {error.object[error.start]:#04x} is not UTF-8; convert the file, for example "
                f"with 'iconv -f GBK -t UTF-8'."
            ) from error

    def line(self, position: int) -> int:
        """Line of a character, from 1."""
        return self.text.count("\n", 0, position) + 1

    def byte_offsets(self, positions: list[int]) -> list[int]:
        """Where ascending character positions lie in the file."""
        if self.text.isascii():
            return [self._mark_bytes + position for position in positions]
        offsets, before, offset = [], 0, self._mark_bytes
        for position in positions:
            offset += len(self.text[before:position].encode())
            before = position
            offsets.append(offset)
        return offsets

    def records(self, problems: list[str]) -> Iterator[tuple[int, int, Any]]:
        """Yield first character, end and value of each element of a JSON list, or of each value of a JSONL file.

        The first character decides which of the two it is, not the file's name.  What is not JSON is appended to
        ``problems``; in JSONL the lines after it are still read.
        """
        text, path = self.text, self.path
        decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)
        position = _skip(text, 0)
        is_list = text.startswith("[", position)
        if is_list:
            position = _skip(text, position + 1)
            if text.startswith("]", position):
                return
        while position < len(text):
            try:
                value, end = decoder.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                problems.append(self._syntax_problem(position, error))
                next_line = text.find("\n", position)
                if is_list or next_line < 0:
                    return
                position = _skip(text, next_line)
                continue
            yield position, end, value
            position = _skip(text, end)
            if not is_list:
                continue
            following = _skip(text, position + 1)
            if text.startswith("]", position) and following == len(text):
                return
            if not text.startswith(",", position) or text.startswith("]", following):
                found = repr(text[position : position + 20]) if position < len(text) else "the end of the file"
                problems.append(
                    f"{path}:{self.line(position)}: expected ',' and an object, or the list's ']' and the end of the "
                    f"file, found {found}."
                )
                return
            position = following
        if is_list:
            problems.append(f"{path}: the list has no final ']'; the file may be cut short.")

    def _syntax_problem(self, position: int, error: Exception) -> str:
        where = f"{self.path}:{self.line(position)}"
        match error:
            case json.JSONDecodeError():
                near = self.text[max(0, error.pos - 30) : error.pos + 10]
                where = f"{self.path}:{error.lineno}:{error.colno}"
                what = f"{error.msg}, near {near!r}"
            case RecursionError():
                what = "it is nested too deeply"
            case _:
                what = str(error)
        return f"{where}: not valid JSON: {what}."


def _skip(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    assert space is not None, "no space matches too"
    return space.end()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, refusing the repeated keys that ``json`` would drop without a word."""
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
