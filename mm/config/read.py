"""Strict reading of a JSON file: accepts nothing that JSON does not have, and knows the line of every key."""

import codecs
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mm.errors import UserError, refuse, refuse_special


@dataclass(frozen=True)
class Document:
    """A JSON file and its value."""

    path: str
    root: Any
    lines: Mapping[tuple[str | int, ...], Sequence[int]]
    """Path of a key (keys and list positions, the key itself last) -> the lines where it stands."""

    def line(self, key_path: str) -> float:
        """The line of the key ``key.path``; infinity where it is absent."""
        return self.lines.get(tuple(key_path.split(".")), [math.inf])[0]

    def at(self, key_path: str) -> str:
        """``file:line: key.path`` for messages; without the line where the key is absent."""
        line = self.line(key_path)
        return f"{self.path}{'' if math.isinf(line) else f':{line}'}: {key_path or 'the file'}"

    def get(self, key_path: str) -> Any:
        """The value at ``key_path``, or None."""
        found: Any = self.root
        for key in key_path.split(".") if key_path else ():
            found = cast(dict[str, Any], found).get(key) if isinstance(found, dict) else None
        return found

    def has(self, key_path: str) -> bool:
        """Whether the key is present, even with the value null."""
        return tuple(key_path.split(".")) in self.lines or not key_path


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


def read_json(path: str | Path) -> Document:
    """Read a UTF-8 JSON file (a byte order mark is fine), refusing everything that JSON does not allow.

    Raises UserError with ``file:line:column`` and the offending line for wrong syntax, and with every duplicate key.
    """
    refuse_special(Path(path))
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a JSON file") from error
    return parse_json(path, data)


def parse_json(path: str | Path, data: bytes) -> Document:
    """Parse ``data``, the bytes of the file at ``path``, as ``read_json`` does."""
    text = _decoded(path, data)
    try:
        root = json.loads(text, parse_int=_integer)
        json.dumps(root, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{path}: a string has half of a surrogate pair (\\ud800 to \\udfff)") from error
    except json.JSONDecodeError as error:
        raise _syntax_error(path, text, *_explained(text, error)) from error
    except RecursionError as error:
        raise UserError(f"{path}: too many levels of nesting") from error
    lines: dict[tuple[str | int, ...], list[int]] = {}
    for place, position in _keys(path, text):
        lines.setdefault(place, []).append(_line(text, position))
    refuse(f"{path}:{line}: {_key_path(place)} appears twice (first on line {found[0]}); remove one of the two"
           for place, found in lines.items() for line in found[1:])
    return Document(str(path), root, lines)


def _integer(word: str) -> float:
    """The integer, or infinity for more digits than ``int`` accepts; ``_keys`` refuses those."""
    return int(word) if math.isfinite(float(word)) else math.inf


def _decoded(path: str | Path, data: bytes) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path}: the encoding is UTF-16; save the file as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        data = error.object  # without a byte order mark, which ``error.start`` does not count
        line = data.count(b"\n", 0, error.start) + 1
        try:
            data.decode("gb18030")
            guess = "probably GBK (GB18030)"
        except UnicodeDecodeError:
            guess = "unknown"
        raise UserError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8 (the encoding is {guess}); save it as UTF-8"
        ) from error


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _syntax_error(path: str | Path, text: str, position: int, problem: str) -> UserError:
    """``problem`` with its position, and the line of the file below it."""
    start = text.rfind("\n", 0, position) + 1
    shown = text[start:].split("\n", 1)[0].rstrip("\r")
    column = position - start
    return UserError(f"{path}:{_line(text, position)}:{column + 1}: {problem}\n    {shown}\n    {' ' * column}^")


def _explained(text: str, error: json.JSONDecodeError) -> tuple[int, str]:
    """Position and description of a syntax error; recognizes common mistakes."""
    before, found = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    position = len(text) - len(found)
    word = match[0] if (match := re.match(r"-?\w+", found)) else found[:1]
    if error.msg.startswith("Extra data"):
        what = "unexpected text after the end of the JSON value"
    elif not error.msg.startswith("Expecting"):
        return error.pos, error.msg
    elif before.endswith(",") and word in ("]", "}"):
        return len(before) - 1, f"trailing comma before {word!r}; remove it"
    elif not word:
        what = "the file ends before the JSON value is complete"
    elif "property name" in error.msg:
        what = "expected a key in double quotes"
    elif "delimiter" in error.msg:
        what = "expected ':' after the key" if "':'" in error.msg else f"expected ',' or '}}' or ']', found {word!r}"
    elif word == "'":
        what = 'strings need double quotes (")'
    elif word in _PYTHON_LITERALS:
        what = f"{word} is not JSON; write {_PYTHON_LITERALS[word]}"
    else:
        what = f"expected a value before {word!r}" if word in ("]", "}", ",") else f"{word!r} is not a JSON value"
    return position, "JSON has no comments; remove this one" if word in ("#", "/") else what


def _key_path(place: tuple[str | int, ...]) -> str:
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in place).removeprefix(".")


def _keys(path: str | Path, text: str) -> Iterator[tuple[tuple[str | int, ...], int]]:
    """Every key of a text that Python reads as JSON: its path, as in ``Document.lines``, and where it begins.

    Raises UserError for a number that JSON does not allow.
    """
    tokens = list(_TOKEN.finditer(text))
    place: list[str | int] = []  # each open object's current key, each open list's current index
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        match token[0]:
            case "{" | "[" as bracket:
                place.append("" if bracket == "{" else 0)
            case "}" | "]":
                place.pop()
            case "," if isinstance(place[-1], int):
                place[-1] += 1
            case _ if following and following[0] == ":":
                place[-1] = json.loads(token[0])
                yield tuple(place), token.start()
            case "NaN" | "Infinity" | "-Infinity" as word:
                raise _syntax_error(
                    path, text, token.start(), f"{word} is not JSON; expected a finite number or null")
            case word if word[0] in "-0123456789" and math.isinf(float(word)):
                raise _syntax_error(path, text, token.start(), f"the number {word} is too large")
            case _:  # another value, or what separates two
                pass
