"""Signals that ask a program to stop: Ctrl-C, SIGTERM from schedulers, and SIGUSR1, which schedulers send earlier.

The first raises ``Stopped`` in the main thread, repeatedly if third-party code swallows it, as some imports do.  While
a run defers signals, the first is only recorded, and the run stops where it can save.  A second one ends the process
immediately.
"""

import os
import select
import signal
import sys
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
_REMINDER_SECONDS = 1.0
"""Seconds between two checks whether ``Stopped`` was swallowed."""

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
        self._has_raised = self._has_ended = False
        self._num_reminders = 0
        """Signals that this process has sent itself and that have not been read yet."""
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
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers, unless the program is ending because of a signal."""
        self._has_ended = True
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
        if self.received is None:
            self.received = number
        elif not self._has_raised or self._has_ended or _is_handling_stopped():
            return  # the thread decides
        if not self._is_deferring:
            self._has_raised = True
            raise Stopped(self.received)

    def _watch(self, reader: int) -> None:
        """Read the numbers of arriving signals, and end the process at a second request.  Remind the main thread until
        it ends."""
        first = None
        with open(reader, "rb", buffering=0) as pipe:
            while True:
                if not select.select([pipe], [], [], None if first is None else _REMINDER_SECONDS)[0]:
                    self._remind()
                    continue
                if not (received := pipe.read(1)):
                    return
                if received[0] not in self._before:
                    continue
                if self._num_reminders:
                    self._num_reminders -= 1
                elif first is None:
                    first = time.monotonic()
                elif time.monotonic() - first > _AGAIN_SECONDS:
                    os._exit(status_after(received[0]))

    def _remind(self) -> None:
        if self._has_raised and not (self._has_ended or self._is_deferring) and self.received is not None:
            self._num_reminders += 1
            signal.pthread_kill(threading.main_thread().ident or 0, self.received)


def _is_handling_stopped() -> bool:
    """Whether the interrupted code is ending because of ``Stopped``, so that it was not swallowed."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, Stopped):
        error = error.__context__
    return error is not None
