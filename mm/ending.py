"""How our programs end: what they report, on which rank, and with which exit status.  For entry points."""

import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from mm.errors import AgreedError, InterruptedRun, ReportedError, UserError, printable

if TYPE_CHECKING:
    import psutil

_LAUNCHER_SECONDS = 60.0
"""How long a rank at most waits for the launcher to end it.  torchrun needs about a second after a rank has exited."""
_LAUNCHED = "TORCHELASTIC_RUN_ID"
"""The environment variable by which torchrun's ranks know it."""
_BEAT_SECONDS = 1.0


def end_with_launcher() -> None:
    """Make this process end when torchrun dies, even if torchrun was killed and could not end its ranks.

    Data workers end with this process.  A process that torchrun did not start is left alone: under ``nohup`` it must
    outlive the shell.
    """
    if _LAUNCHED in os.environ:
        Thread(target=_end_with, args=(_launcher(),), name="launcher's end", daemon=True).start()


def _launcher() -> "psutil.Process | None":
    """The nearest ancestor that torchrun did not start: a program that profiles or binds this one may be between.

    None if it has ended.
    """
    import psutil  # not above: a Python without any package imports this file, and says so

    found = psutil.Process().parent()
    try:
        while found is not None and found.environ().get(_LAUNCHED) == os.environ[_LAUNCHED]:
            found = found.parent()
    except psutil.AccessDenied:
        return found  # another user's process: the system does not show what it was started with
    except psutil.NoSuchProcess:
        return None
    return found


def _end_with(launcher: "psutil.Process | None") -> None:
    import psutil

    with suppress(psutil.NoSuchProcess):
        while launcher is not None and launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_BEAT_SECONDS)
    sys.stderr.write(f"error: torchrun has died, so its rank {os.environ['RANK']} ends\n")
    sys.stderr.flush()
    os._exit(1)


_INTERRUPTED = 130
"""The exit status that shells expect after Ctrl-C: 128 and the number of the signal."""
_AGAIN_SECONDS = 2.0
"""Ctrl-C reaches a rank twice, from the terminal and from the launcher; one that comes later is meant."""


def run_command(command: Callable[[], int], kept: Callable[[], str], is_rank: bool = False) -> int:
    """Run a program and return its exit status: that of ``command``, or 130 after Ctrl-C.

    After Ctrl-C one line, on one rank, says so and what is left of the work (``kept``).  A second Ctrl-C ends the
    process at once.  ``is_rank``: the process may be in the middle of a collective, so it exits without returning.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may have fewer characters than the data
    interrupt = _Interrupt()
    try:
        with interrupt:
            return command()
    except ModuleNotFoundError as error:
        return not_installed(error)
    except KeyboardInterrupt as error:
        if is_first_rank() or isinstance(error, InterruptedRun):
            sys.stderr.write(f"\nInterrupted: {printable(kept())}.\n"[not sys.stderr.isatty() :])  # below a bar or ^C
        sys.stdout.flush()
        sys.stderr.flush()
        if is_rank:
            os._exit(_INTERRUPTED)  # at a usual end, process groups would wait for other ranks, or abort this process
        return _INTERRUPTED


class _Interrupt:
    """Ctrl-C as a context: KeyboardInterrupt the first time, and the end of the process when it comes again later."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._before: signal.Handlers | Callable[[int, FrameType | None], object] | int | None = None

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            self._before = signal.signal(signal.SIGINT, self._handle)

    def __exit__(self, *_: object) -> None:
        if self._before is not None and self._since is None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._since is None:
            self._since = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - self._since > _AGAIN_SECONDS:
            os._exit(_INTERRUPTED)


def say_notes(notes: Iterable[str], stream: TextIO | None = None) -> None:
    """Write each of ``notes`` on a line of ``stream``, or of the standard output."""
    file = sys.stdout if stream is None else stream
    assert file is not None, "a command has a standard output"
    file.write("".join(f"note: {printable(note)}\n" for note in notes))  # one write: ranks share the screen
    file.flush()


def is_first_rank() -> bool:
    """Whether this process prints what all ranks know."""
    return os.environ.get("RANK", "0") == "0"


def not_installed(error: ModuleNotFoundError) -> int:
    """Say that this Python lacks a package, as one outside of the environment does; returns the exit status, 2.

    Raises ``error`` itself where the module is one of ours, which is a fault of the program.
    """
    name = error.name or ""
    if name.partition(".")[0] in ("mm", "checkpoint"):
        raise error
    if is_first_rank():
        sys.stderr.write(f"error: {sys.executable} has no package {name!r}, so it is not the environment of this "
                         f"repository; run \"source .venv/bin/activate\" (\"make .venv/.ready\" makes it), and "
                         f"start this command again\n")
    return 2


def tell(notes: Iterable[str]) -> None:
    """Print notes that every rank has, on one rank."""
    if is_first_rank():
        say_notes(notes, sys.stderr)


def refused(error: UserError) -> int:
    """Print an error that every rank hits before communication starts; return the exit status, 2.

    Rank 0 of the node prints at once; the others wait for the launcher to end them, so it appears once.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        _wait_for_the_launcher()
    return _report(error)


def status_of(action: Callable[[], int]) -> int:
    """Run what the ranks do together, and return its status: what ``action`` returns, or 2 after a report.

    Does not return after a failure that all ranks end because of.
    """
    try:
        return action()
    except AgreedError as error:  # every rank raises it; rank 0 reports it
        if not is_first_rank():
            _wait_for_the_launcher()
            return 2
        return _report(error)
    except UserError as error:
        return _report(error)
    except ReportedError as error:
        _tell_the_launcher([str(error)])
        sys.stdout.flush()
        os._exit(1)  # at a usual end, process groups that other threads still hold would abort this process


def _wait_for_the_launcher() -> None:
    """Sleep while another rank reports; its exit makes the launcher end this process.

    The time limit is for an error that only this rank has found.
    """
    time.sleep(_LAUNCHER_SECONDS)


def _report(error: UserError) -> int:
    start = "error: " if is_first_rank() else f"[rank {os.environ['RANK']}] error: "
    sys.stderr.write("".join(f"{start}{problem}\n" for problem in error.problems))  # one write: ranks share the screen
    sys.stderr.flush()
    _tell_the_launcher(error.problems)
    return 2


def _tell_the_launcher(problems: Sequence[str]) -> None:
    """Give torchrun what it shows as the root cause, in its own format, in place of a hint how to get a traceback.

    torchrun itself ends with 1 and a traceback of its own whenever a rank ends with another status than 0.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    others = f" ({len(problems) - 1} more stand above)" if len(problems) > 1 else ""
    message = {"message": f"{problems[0]}{others}", "extraInfo": {"timestamp": str(int(time.time()))}}
    Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")
