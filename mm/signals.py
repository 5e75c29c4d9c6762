"""Signals that ask a program to stop: Ctrl-C, SIGTERM from schedulers, and SIGUSR1, which schedulers send earlier.

The first raises ``Stopped`` in the main thread.  While a run defers it, it is only recorded, and the run stops where
it can save.  A second one ends the process at once.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mm.errors import Stopped

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_AGAIN_SECONDS = 2.0
"""A signal may reach a rank several times: from the terminal, the launcher and the scheduler.  One that comes this long
after the first is a second request."""

Handler = signal.Handlers | Callable[[int, FrameType | None], object] | int | None


def status_after(number: int) -> int:
    """The exit status that shells and schedulers expect of a program that this signal has ended."""
    return 128 + number


def shown(number: int) -> str:
    """The signal as users know it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def ignore_stopping() -> None:
    """Ignore these signals in a helper process: they reach every process of a job, and the main process decides."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def defer_stopping() -> None:
    """Go on after a signal while this process, which is failing anyway, reports why; a second one still ends it."""
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                signal.signal(number, lambda *_: None)


class StopSignals:
    """Context that handles the signals of ``STOPPING``, except those that this process ignores already."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        """When the program began."""
        self.received: int | None = None
        """The signal that came first."""
        self._is_deferring = False
        self._before: dict[int, Handler] = {}
        self._wakeup = -1

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in STOPPING:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._handle)
        # Python runs handlers in the main thread only, which may be stuck in a collective: a thread ends the process.
        reader, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        threading.Thread(target=_end_at_second, args=(reader, frozenset(self._before)), name="signals",
                         daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers, unless the program is ending because of a signal."""
        if self._wakeup < 0 or self.received is not None:
            return
        signal.set_wakeup_fd(-1)
        os.close(self._wakeup)  # ends the thread
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """While inside, a signal only sets ``received``."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            return  # the thread decides
        self.received = number
        if not self._is_deferring:
            raise Stopped(number)


def _end_at_second(reader: int, handled: frozenset[int]) -> None:
    """Read the numbers of arriving signals, and end the process at a second request."""
    first = None
    with open(reader, "rb", buffering=0) as pipe:
        while received := pipe.read(1):
            if received[0] not in handled:
                continue
            if first is None:
                first = time.monotonic()
            elif time.monotonic() - first > _AGAIN_SECONDS:
                os._exit(status_after(received[0]))
