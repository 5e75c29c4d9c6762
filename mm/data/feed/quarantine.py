"""Samples that a run leaves out because they cannot be used: counted, listed in a file, and too many refused.

Who finds them, and what stands in their place, is not known here.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from mm.data.record_name import BadSample
from mm.errors import UserError, writing
from mm.files import whole_lines

LEDGER = "quarantine.jsonl"
"""In ``--log-dir``: one line for each sample."""


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
    lines = whole_lines(ledger.read_bytes())
    os.truncate(ledger, sum(map(len, lines)))
    try:
        rows = [json.loads(line) for line in lines]
        return {(row["dataset"], row["index"]) for row in rows}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{ledger}: is no list of samples of an earlier run ({error}); move it away.") from error
