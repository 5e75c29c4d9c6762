"""Strict reading of a JSON file, with the line of every key.

Python's own reader keeps the last of two equal keys, accepts NaN, and cannot say on which line a key stands; hence the
small reader here.  It is meant for configuration files, not for datasets.  Knows nothing of what any key means.
"""

import codecs
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm.errors import UserError

_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD = re.compile(r"-?[A-Za-z_]+")
_SPACE = re.compile(r"[ \t\n\r]*")
_LITERALS = {"true": True, "false": False, "null": None}
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 100
_MAX_DIGITS = 30


@dataclass(frozen=True)
class Document:
    """A parsed JSON file.  ``lines`` maps key paths such as ``text_decoder.mrope_section[0]`` to line numbers."""

    path: str
    root: Any
    lines: Mapping[str, int]

    def at(self, key_path: str) -> str:
        """``file:line: key.path`` for messages; without the line where the key is absent."""
        line = f":{self.lines[key_path]}" if key_path in self.lines else ""
        return f"{self.path}{line}: {key_path or 'the file'}"


def read_json(path: str | Path) -> Document:
    """Read a UTF-8 JSON file (a byte order mark is fine), refusing everything that JSON does not allow.

    Raises UserError with ``file:line:column`` and the offending line for wrong syntax, and with every duplicate key.
    """
    text = _decoded(Path(path))
    parser = _Parser(str(path), text)
    root = parser.parse()
    if parser.problems:
        raise UserError(parser.problems)
    return Document(str(path), root, parser.lines)


def _decoded(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a JSON file") from error
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path}: the encoding is UTF-16; save the file as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        try:
            data.decode("gb18030")
            guess = "probably GBK (GB18030)"
        except UnicodeDecodeError:
            guess = "unknown"
        raise UserError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8 (the encoding is {guess}); save it as UTF-8"
        ) from error


class _Parser:
    """Recursive descent over one text; strings are left to the standard library's scanner."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.lines: dict[str, int] = {}
        self.problems: list[str] = []

    def parse(self) -> Any:
        value, end = self._value(0, "", 0)
        end = self._skip(end)
        if end != len(self.text):
            raise self._error(end, "unexpected text after the end of the JSON value")
        return value

    def _line(self, position: int) -> int:
        return self.text.count("\n", 0, position) + 1

    def _error(self, position: int, what: str) -> UserError:
        start = self.text.rfind("\n", 0, position) + 1
        shown = self.text[start:].split("\n", 1)[0].rstrip("\r")
        pointer = " " * (position - start) + "^"
        where = f"{self.path}:{self._line(position)}:{position - start + 1}"
        return UserError([*self.problems, f"{where}: {what}\n    {shown}\n    {pointer}"])

    def _skip(self, position: int) -> int:
        match = _SPACE.match(self.text, position)
        assert match
        if self.text[match.end() : match.end() + 1] in ("#", "/"):
            raise self._error(match.end(), "JSON has no comments; remove this one")
        return match.end()

    def _value(self, position: int, key_path: str, depth: int) -> tuple[Any, int]:
        position = self._skip(position)
        if depth > _MAX_DEPTH:
            raise self._error(position, f"more than {_MAX_DEPTH} levels of nesting")
        match self.text[position : position + 1]:
            case "":
                raise self._error(position, "the file ends where a value was expected")
            case "{":
                return self._object(position + 1, key_path, depth)
            case "[":
                return self._array(position + 1, key_path, depth)
            case '"':
                return self._string(position)
            case "'":
                raise self._error(position, 'strings need double quotes (")')
        return self._literal_or_number(position)

    def _string(self, position: int) -> tuple[str, int]:
        try:
            return json.decoder.scanstring(self.text, position + 1, True)
        except json.JSONDecodeError as error:
            raise self._error(error.pos, error.msg) from error

    def _literal_or_number(self, position: int) -> tuple[Any, int]:
        if match := _NUMBER.match(self.text, position):
            is_int = match[2] is None and match[3] is None
            if is_int and len(match[0]) > _MAX_DIGITS:
                raise self._error(position, f"the number has more than {_MAX_DIGITS} digits")
            number = int(match[0]) if is_int else float(match[0])
            if math.isinf(number):
                raise self._error(position, f"the number {match[0]} is too large")
            return number, match.end()
        match = _WORD.match(self.text, position)
        word = match[0] if match else self.text[position]
        if word in _LITERALS:
            return _LITERALS[word], position + len(word)
        if word in _PYTHON_LITERALS:
            raise self._error(position, f"{word} is not JSON; write {_PYTHON_LITERALS[word]}")
        if word.lstrip("-") in ("NaN", "Infinity"):
            raise self._error(position, f"{word} is not JSON; expected a finite number or null")
        if word in ("]", "}", ","):
            raise self._error(position, f"expected a value before {word!r}")
        raise self._error(position, f"{word!r} is not a JSON value")

    def _object(self, position: int, key_path: str, depth: int) -> tuple[dict[str, Any], int]:
        result: dict[str, Any] = {}
        position = self._skip(position)
        if self.text[position : position + 1] == "}":
            return result, position + 1
        while True:
            if self.text[position : position + 1] != '"':
                raise self._error(position, "expected a key in double quotes")
            start, (key, position) = position, self._string(position)
            inner = f"{key_path}.{key}" if key_path else key
            if key in result:
                self.problems.append(
                    f"{self.path}:{self._line(start)}: {inner} appears twice (first on line {self.lines[inner]}); "
                    f"remove one of the two"
                )
            self.lines[inner] = self._line(start)
            position = self._skip(position)
            if self.text[position : position + 1] != ":":
                raise self._error(position, f"expected ':' after the key {key!r}")
            result[key], position = self._value(position + 1, inner, depth + 1)
            position, ended = self._separator(position, "}")
            if ended:
                return result, position

    def _array(self, position: int, key_path: str, depth: int) -> tuple[list[Any], int]:
        result: list[Any] = []
        position = self._skip(position)
        if self.text[position : position + 1] == "]":
            return result, position + 1
        while True:
            inner = f"{key_path}[{len(result)}]"
            self.lines[inner] = self._line(position)
            value, position = self._value(position, inner, depth + 1)
            result.append(value)
            position, ended = self._separator(position, "]")
            if ended:
                return result, position

    def _separator(self, position: int, closing: str) -> tuple[int, bool]:
        """Pass a comma (to the next item) or ``closing``; say which of the two it was."""
        position = self._skip(position)
        match self.text[position : position + 1]:
            case ",":
                following = self._skip(position + 1)
                if self.text[following : following + 1] == closing:
                    raise self._error(position, f"trailing comma before {closing!r}; remove it")
                return following, False
            case found if found == closing:
                return position + 1, True
            case "":
                raise self._error(position, f"the file ends where ',' or {closing!r} was expected")
            case found:
                raise self._error(position, f"expected ',' or {closing!r}, found {found!r}")
