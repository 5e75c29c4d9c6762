"""How messages name a record, and the description of a bad record."""

from dataclasses import dataclass
from typing import Any

from mm.config.schema import shown

_ID_CHARACTERS = 80
"""Longer ids are shortened in messages."""


@dataclass(frozen=True)
class BadSample:
    """A record that cannot be used.  Its fields are one line of ``quarantine.jsonl``."""

    dataset: str
    """Path of its file."""
    line: int | None
    """Its line in the file, counted from 1; None if the file has no lines."""
    index: int
    """Its index in the file, counted from 0."""
    id: str | int | None
    """Its own ``id`` field, if any."""
    path: str | None
    """The image or video that causes the problem, if any."""
    reason: str

    @property
    def where(self) -> str:
        return self.dataset if self.line is None else f"{self.dataset}:{self.line}"

    @property
    def what(self) -> str:
        return f"{numbered('record', self.index, self.id)}: {self.reason}"

    def message(self) -> str:
        return f"{self.where}: {self.what}"


def numbered(what: str, index: int, name: str | int | None = None) -> str:
    """``what``, its index and its ``name``.  One line of a file may contain a whole list, so the line number alone does
    not identify a record."""
    called = "" if name is None else f", id {_short(name)}"
    return f"{what} {index} (counted from 0{called})"


def record_place(path: str, index: int, name: str | int | None = None) -> str:
    """The place of a record whose line is unknown.  The form ``path:N`` is reserved for line numbers."""
    return f"{path}: record {index}" + ("" if name is None else f" (id {_short(name)})")


def name_of(record: Any) -> str | int | None:
    """The ``id`` of a record, or None."""
    name = record.get("id") if isinstance(record, dict) else None
    return name if isinstance(name, str | int) else None


def described(value: Any) -> str:
    """What a value is, without the text in it: samples may be private, and messages go to logs."""
    match value:
        case str() if value:
            return f"a string of {len(value)} characters"
        case list() if value:
            return f"a list of {len(value)}"
        case dict() if value:
            return f"an object with the keys {shown(list(value))}"
        case _:
            return shown(value)


def _short(name: str | int) -> str:
    """An id for messages: ``repr`` escapes control characters and lone surrogates; long ids are shortened."""
    text = repr(name)
    return text if len(text) <= _ID_CHARACTERS else f"{text[: _ID_CHARACTERS - 3]}..."
