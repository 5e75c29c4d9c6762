"""Samples that a run leaves out because they cannot be used: counted, listed in a file, and too many refused.

Who finds them, and what stands in their place, is not known here.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from mm.errors import UserError

LEDGER = "quarantine.jsonl"
"""In ``--log-dir``: one line for each sample."""


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
        return sample_problem(self.index, self.reason)

    def told(self) -> str:
        return f"{self.where}: {self.what}"


def sample_problem(index: int, reason: str) -> str:
    """What is said of sample ``index`` of a file, after the place where it stands."""
    return f"{numbered('sample', index)}: {reason}"


def numbered(what: str, index: int) -> str:
    """Record ``index`` of a file: a list may stand in one line, so the line alone does not say which one it is."""
    return f"{what} {index} (counted from 0)"


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
        if len(self._known) > self._max_fraction * self._num_samples:
            raise UserError(
                f"{len(self._known)} of {self._num_samples} samples cannot be used, more than --max-bad-fraction "
                f"{self._max_fraction:g} allows; {LEDGER} in --log-dir lists them: mend or remove them, or allow more. "
                f"The last: {found[-1].told()}")

    def _write(self, ledger: Path, found: Iterable[BadSample]) -> None:
        new = {(one.dataset, one.index): one for one in found if (one.dataset, one.index) not in self._written}
        if not new:
            return
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
