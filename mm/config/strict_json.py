"""Strict reading of JSON files: UTF-8, no key twice, and nothing that only Python accepts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from mm.errors import UserError, refuse_special


@dataclass(frozen=True)
class Document:
    """A JSON file and its value."""

    path: str
    root: Any

    def at(self, key_path: str) -> str:
        """``file: key.path`` for messages."""
        return f"{self.path}: {key_path or 'the file'}"

    def get(self, key_path: str) -> Any:
        """The value at ``key_path``, or None."""
        found: Any = self.root
        for key in key_path.split(".") if key_path else ():
            found = cast(dict[str, Any], found).get(key) if isinstance(found, dict) else None
        return found

    def has(self, key_path: str) -> bool:
        """Whether the key is present, even with the value null."""
        outer, _, key = key_path.rpartition(".")
        return not key_path or (isinstance(found := self.get(outer), dict) and key in found)


def read_json(path: str | Path) -> Document:
    """Read a UTF-8 JSON file (a byte order mark is fine); raises UserError for anything that JSON does not allow."""
    refuse_special(Path(path))
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a JSON file") from error
    return parse_json(path, data)


def parse_json(path: str | Path, data: bytes) -> Document:
    """Parse ``data``, the bytes of the file at ``path``, as ``read_json`` does."""
    try:
        text = data.decode("utf-8-sig")
        return Document(str(path), json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {not_utf8(error)}") from error
    except json.JSONDecodeError as error:
        line = error.doc.split("\n")[error.lineno - 1].strip()
        raise UserError(f"{path}:{error.lineno}:{error.colno}: {error.msg}, in {line[:80]!r}; JSON has double quotes, "
                        f"true, false and null, and neither comments nor a comma after the last value") from error
    except RecursionError as error:
        raise UserError(f"{path}: too many levels of nesting") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def not_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with text in another encoding, and the cure."""
    return (f"byte {error.object[error.start]:#04x} is not UTF-8; save the file as UTF-8, for example with 'iconv -f "
            f"GBK -t UTF-8'")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"{twice} appears twice in one object; remove one of the two")
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON; expected a finite number or null")
