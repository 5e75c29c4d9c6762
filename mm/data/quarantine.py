"""Samples that a run leaves out because they cannot be used: counted, listed in a file, and too many refused.

Who finds them, and what stands in their place, is not known here.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mm.errors import UserError, writing

LEDGER = "quarantine.jsonl"
"""In ``--log-dir``: one line for each sample."""
_ID_CHARACTERS = 80
"""Of an id in a message."""


@dataclass(frozen=True)
class BadSample:
    """One line of the ledger."""

    dataset: str
    """The file that it is in."""
    line: int | None
    """Of the file, from 1; None where it has no lines."""
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


def too_many_bad(num_bad: int, num_samples: int, max_fraction: float) -> str | None:
    """Why a dataset is refused of whose ``num_samples`` so many cannot be used; None where it is not."""
    if num_bad <= max_fraction * num_samples:
        return None
    return (f"{num_bad} of {num_samples} samples cannot be used, more than --max-bad-fraction {max_fraction:g} allows")


class Quarantine:
    """The same on every rank that reads data, if all are given the same samples; one of them writes."""

    def __init__(self, num_samples: int, max_fraction: float, ledger: Path | None) -> None:
        """``ledger`` is None on ranks that do not write; what an earlier run has left in it stays."""
        self._num_samples, self._max_fraction, self._ledger = num_samples, max_fraction, ledger
        self._known: set[tuple[str, int]] = set()
        self._written = set() if ledger is None else _places(ledger)

    def add(self, found: Iterable[BadSample]) -> None:
        """Raises UserError when more of the dataset's samples are bad than may be; each counts once."""
        found = list(found)
        self._known |= {(one.dataset, one.index) for one in found}
        if self._ledger is not None:
            self._write(self._ledger, found)
        problem = too_many_bad(len(self._known), self._num_samples, self._max_fraction)
        if problem is not None:
            raise UserError(f"{problem}; {LEDGER} in --log-dir lists them: mend or remove them, or allow more. "
                            f"The last: {found[-1].told()}")

    def _write(self, ledger: Path, found: Iterable[BadSample]) -> None:
        new = {(one.dataset, one.index): one for one in found if (one.dataset, one.index) not in self._written}
        if not new:
            return
        with writing(ledger, "--log-dir"):
            ledger.parent.mkdir(parents=True, exist_ok=True)
            with open(ledger, "a", encoding="utf-8") as stream:
                stream.writelines(json.dumps(asdict(one)) + "\n" for one in new.values())
        self._written |= set(new)


def _places(ledger: Path) -> set[tuple[str, int]]:
    """Which samples an earlier run has listed; a last line that it did not finish is cut off."""
    if not ledger.exists():
        return set()
    raw = ledger.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        os.truncate(ledger, whole)
    try:
        rows = [json.loads(line) for line in raw[:whole].split(b"\n")[:-1]]
        return {(row["dataset"], row["index"]) for row in rows}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{ledger}: is no list of samples of an earlier run ({error}); move it away.") from error
