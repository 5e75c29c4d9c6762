"""Bad samples that a run leaves out: counted, listed in a file, and refused if there are too many."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from mm.data.sample import BadSample
from mm.errors import UserError, writing
from mm.files import json_object, read_regular, regular, whole_lines

LEDGER = "quarantine.jsonl"
"""Name of the file in ``--log-dir``, with one line per bad sample."""


def too_many_bad(num_bad: int, num_samples: int, max_fraction: float) -> str | None:
    """The reason to refuse a dataset with ``num_bad`` bad samples of ``num_samples``; None if they are few enough."""
    if num_bad <= max_fraction * num_samples:
        return None
    return (f"{num_bad} of {num_samples} samples cannot be used, more than --max-bad-fraction {max_fraction:g} allows")


class Quarantine:
    """Has the same content on every rank that reads data, if all add the same samples.  One rank writes the file."""

    def __init__(self, num_samples: int, max_fraction: float, ledger: Path | None) -> None:
        """``ledger`` is None on ranks that do not write.  Lines of an earlier run are kept."""
        self._num_samples, self._max_fraction, self._ledger = num_samples, max_fraction, ledger
        self._known: set[tuple[str, int]] = set()
        self._written = set() if ledger is None else _places(ledger)

    def add(self, found: Iterable[BadSample]) -> None:
        """Raises UserError when more samples are bad than allowed; each counts once."""
        found = list(found)
        self._known |= {(one.dataset, one.index) for one in found}
        if self._ledger is not None:
            self._write(self._ledger, found)
        problem = too_many_bad(len(self._known), self._num_samples, self._max_fraction)
        if problem is not None:
            raise UserError(f"{problem}; {LEDGER} in --log-dir lists them: repair or remove them, or raise the limit. "
                            f"The last one: {found[-1].message()}")

    def _write(self, ledger: Path, found: Iterable[BadSample]) -> None:
        new = {(one.dataset, one.index): one for one in found if (one.dataset, one.index) not in self._written}
        if not new:
            return
        with writing(ledger, "--log-dir"):
            ledger.parent.mkdir(parents=True, exist_ok=True)
            with open(ledger, "a", encoding="utf-8", errors="backslashreplace", opener=regular) as stream:
                stream.writelines(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in new.values())
        self._written |= set(new)


def _places(ledger: Path) -> set[tuple[str, int]]:
    """The samples that an earlier run listed; an incomplete last line is cut off."""
    if not ledger.exists():
        return set()
    with writing(ledger, "--log-dir"):
        lines = whole_lines(read_regular(ledger))
        os.truncate(ledger, sum(map(len, lines)))
    try:
        rows = [json_object(line) for line in lines]
        return {(row["dataset"], row["index"]) for row in rows}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{ledger}: is not a list of an earlier run's bad samples ({error}); move it away.") from error
