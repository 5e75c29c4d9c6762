"""Progress of long work: a bar on a terminal, otherwise a line every half minute.

The lines in a job's log show that it is alive, and how long it will take.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from threading import Lock
from types import TracebackType
from typing import TypeVar

from tqdm import tqdm

from mm.errors import printable

Item = TypeVar("Item")

EVERY_SECONDS = 30.0
"""Seconds between two lines without a terminal; shorter work prints none."""
_DELAY_SECONDS = 2.0
"""Seconds before a bar appears."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Progress:
    """Context that shows the progress of ``total`` parts of work, of which ``done`` are already done.

    Any thread may call ``update``.
    """

    def __init__(
        self, what: str, total: int | None = None, unit: str = "", done: int = 0, is_shown: bool = True
    ) -> None:
        """``unit``: "B" for bytes, else what is counted, such as "records".  ``total`` is None if unknown.

        ``is_shown`` is False on ranks that show nothing, because another rank does.
        """
        self._what, self._total, self._unit, self._done = printable(what), total, unit, done
        self._lock, self._is_bytes = Lock(), unit == "B"
        has_terminal = sys.stderr.isatty()
        self._prints = is_shown and not has_terminal
        self._began = self._last_print = time.monotonic()
        self._has_printed = False
        self._bar = tqdm(total=total, initial=done, desc=self._what, unit="B" if self._is_bytes else f" {unit}",
                         unit_scale=self._is_bytes, unit_divisor=1024, delay=_DELAY_SECONDS,
                         disable=not (is_shown and has_terminal))

    @property
    def done(self) -> int:
        """How many parts are done."""
        return self._done

    def update(self, count: int = 1) -> None:
        """Count ``count`` more parts as done."""
        with self._lock:
            self._done += count
            self._bar.update(count)
            now = time.monotonic()
            if self._prints and now - self._last_print >= EVERY_SECONDS:
                self._last_print, self._has_printed = now, True
                self._print(now)

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield ``items``; each counts as done when the next one is requested."""
        with self:
            for item in items:
                yield item
                self.update()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, _: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(is_whole=error is None)

    def close(self, is_whole: bool = True) -> None:
        """Remove the bar, or print a last line if any was printed and the work ``is_whole``, not interrupted."""
        self._bar.close()
        if self._has_printed and is_whole:
            self._print(time.monotonic(), " in all")

    def _print(self, now: float, more: str = "") -> None:
        of_total = f" of {self._counted(self._total)} ({self._done / self._total:.0%})" if self._total else ""
        sys.stderr.write(f"{self._what}: {self._counted(self._done)}{of_total}{'' if self._is_bytes else ' '}"
                         f"{'' if self._is_bytes else self._unit}, {now - self._began:.0f} s{more}\n")
        sys.stderr.flush()

    def _counted(self, number: int) -> str:
        if not self._is_bytes:
            return f"{number:,}"
        power = min(max(number.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
        return f"{number / 1024**power:.{1 if power else 0}f} {_UNITS[power]}"
