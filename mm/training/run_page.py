"""Keeps the page of a run up to date (--page): folds each row as it is written, and writes the page now and then.

Nothing that goes wrong with the page ends the run: the first failure is reported, and the next refresh tries again.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from mm.config.outputs import PAGE_FILE
from mm.page.history import History
from mm.page.pages import run_page
from mm.page.record import read_beside, run_names
from mm.report import write_page

_SECONDS = 300.0
"""The page is written at least this often, between steps."""


class RunPage:
    """The page of the run that writes ``metrics``, on the rank that writes them."""

    def __init__(self, metrics: Path, facts: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Read the rows that a resumed run continues.

        ``facts`` are the content of ``run.json``; ``say`` reports the first failure.
        """
        self._metrics, self._facts, self._say = metrics, facts, say
        self._path = metrics.with_name(PAGE_FILE)
        self._written = -_SECONDS
        self._has_failed = False
        self._history = History()
        with self._reported():
            self._history = History.read(metrics)

    def fold(self, row: Mapping[str, Any]) -> None:
        """Add a row of ``metrics.jsonl``."""
        with self._reported():
            self._history.fold(row)

    def refresh(self, has_news: bool) -> None:
        """Write the page if there is news, or it was not written for some minutes."""
        if has_news or time.monotonic() - self._written >= _SECONDS:
            self._write()

    def end(self, ended: Mapping[str, Any] | None) -> None:
        """Write the page for the last time."""
        self._facts = {**self._facts, "ended": ended} if ended is not None else self._facts
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        with self._reported():
            (name,) = run_names([self._metrics.parent])
            write_page(self._path, run_page(
                read_beside(self._metrics, name, self._facts, self._history), datetime.now()))

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a page is never worth a run, whatever is wrong with it
            if not self._has_failed:
                self._has_failed = True
                self._say(f"note: the page {self._path} cannot be written ({type(error).__name__}: {error}); training "
                          f"goes on, and python -m mm.page {self._metrics.parent} writes it later")
