"""How messages name a record, and a record that cannot be used.

Who reads records, and what becomes of a bad one, is not known here.
"""

from dataclasses import dataclass
from typing import Any

_ID_CHARACTERS = 80
"""The most characters of an id that a message shows."""


@dataclass(frozen=True)
class BadSample:
    """A record that cannot be used: one line of ``quarantine.jsonl``."""

    dataset: str
    """The file that it is in."""
    line: int | None
    """Its line in the file, counted from 1; None if the file has no lines."""
    index: int
    """In the file, from 0."""
    id: str | int | None
    """What the sample calls itself."""
    path: str | None
    """The picture or video at fault, where it is one."""
    reason: str

    @property
    def where(self) -> str:
        return self.dataset if self.line is None else f"{self.dataset}:{self.line}"

    @property
    def what(self) -> str:
        return record_problem(self.index, self.id, self.reason)

    def told(self) -> str:
        return f"{self.where}: {self.what}"


def record_problem(index: int, name: str | int | None, reason: str) -> str:
    """What is said of record ``index`` of a file, after the file and the line where it stands."""
    return f"{numbered('record', index, name)}: {reason}"


def numbered(what: str, index: int, name: str | int | None = None) -> str:
    """Record ``index`` of a file, with the ``name`` that it gives itself: a list may stand in one line, so the line
    alone does not say which one it is."""
    called = "" if name is None else f", id {_short(name)}"
    return f"{what} {index} (counted from 0{called})"


def record_place(path: str, index: int, name: str | int | None = None) -> str:
    """Where a record stands, when its line is not known.  ``path:N`` always means line N, so this is not written so."""
    return f"{path}: record {index}" + ("" if name is None else f" (id {_short(name)})")


def name_of(record: Any) -> str | int | None:
    """What a record calls itself: its ``id``."""
    name = record.get("id") if isinstance(record, dict) else None
    return name if isinstance(name, str | int) else None


def _short(name: str | int) -> str:
    """An id in a message: ``repr`` escapes control characters and half characters; a long one is cut."""
    text = repr(name)
    return text if len(text) <= _ID_CHARACTERS else f"{text[: _ID_CHARACTERS - 3]}..."
