"""How programs end: which messages they print, on which rank, and the exit status.  Used by entry points."""

import io
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, NoReturn, TextIO

from mm.errors import AgreedError, ReportedError, Stopped, StoppedRun, UserError, file_error, printable
from mm.launched import Launched
from mm.signals import StopSignals, shown, status_after

if TYPE_CHECKING:
    import psutil

_LAUNCHER_SECONDS = 60.0
"""Longest time a rank waits for the launcher to end it.  torchrun needs about a second after a rank has exited."""
_LAUNCHED = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets in its ranks; its value identifies the launch."""
_BEAT_SECONDS = 1.0
_OUTPUT = 1
"""The file descriptor of the standard output."""
_EXTENSION = "Failed to load the backend extension: "
"""How torch's message begins if it cannot load the extension of a device."""


def end_with_launcher() -> None:
    """Make this process end when torchrun dies, even if torchrun was killed and could not end its ranks.

    Data workers end with this process.  A process that torchrun did not start is not watched: under ``nohup`` it must
    outlive the shell.
    """
    if _LAUNCHED in os.environ:
        Thread(target=_end_with, args=(_launcher(),), name="launcher's end", daemon=True).start()


def _launcher() -> "psutil.Process | None":
    """Return torchrun's process, or None if it has ended.

    It is the nearest ancestor without torchrun's environment: a profiler or a binding program may be in between.
    """
    import psutil  # not at the top: a Python without any package imports this file, to report what is missing

    found = psutil.Process().parent()
    try:
        while found is not None and found.environ().get(_LAUNCHED) == os.environ[_LAUNCHED]:
            found = found.parent()
    except psutil.AccessDenied:
        return found  # another user's process: the system hides its environment
    except psutil.NoSuchProcess:
        return None
    return found


def _end_with(launcher: "psutil.Process | None") -> None:
    import psutil

    with suppress(psutil.NoSuchProcess):
        while launcher is not None and launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_BEAT_SECONDS)
    sys.stderr.write(f"error: torchrun has died, so its rank {Launched.here().rank} ends\n")
    sys.stderr.flush()
    os._exit(1)


def run_command(
    command: Callable[[], int], kept: Callable[[], str], is_rank: bool = False, signals: StopSignals | None = None
) -> int:
    """Run a program and return its exit status: that of ``command``, 2 after a UserError, which is printed, or 128 plus
    the number of a signal that ended it.

    After a signal, one rank prints one line, which says what remains of the work (``kept``).  ``is_rank``: the process
    may be in the middle of a collective, so it exits without returning.  ``signals``: for a command that defers them.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may have fewer characters than the data
    try:
        with signals or StopSignals():
            status = command()
        sys.stdout.flush()
        return status
    except UserError as error:
        return refused(error)
    except ModuleNotFoundError as error:
        return not_installed(error)
    except RuntimeError as error:
        return not_loaded(error)
    except OSError as error:
        if not is_rank and isinstance(error, BrokenPipeError) and _has_no_reader():
            return status_after(signal.SIGPIPE)
        if (problem := file_error(error)) is None:
            raise
        return refused(problem)
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Stopped) else signal.SIGINT
        if is_first_rank() or isinstance(error, StoppedRun):
            cause = "Interrupted" if number == signal.SIGINT else f"Stopped by {shown(number)}"
            sys.stderr.write(f"\n{cause}: {printable(kept())}.\n"[not sys.stderr.isatty() :])  # below a bar or ^C
        sys.stdout.flush()
        sys.stderr.flush()
        if is_rank:  # a normal exit would wait for other ranks in process groups, or abort this process
            leave(status_after(number))
        return status_after(number)


def _has_no_reader() -> bool:
    """Whether the standard output is a pipe whose reader has ended, such as ``head``; if so, drop what is unwritten."""
    waiting = select.poll()
    waiting.register(_OUTPUT, 0)
    if not any(events & select.POLLERR for _, events in waiting.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), _OUTPUT)
    return True


def leave(status: int) -> NoReturn:
    """End this process immediately, without Python's exit handlers.  Removes multiprocessing's temporary folder, as one
    of them would."""
    if (multiprocessing := sys.modules.get("multiprocessing.util")) is not None:
        with suppress(OSError):  # it may be on a full disk
            shutil.rmtree(multiprocessing.get_temp_dir())
    os._exit(status)


def print_notes(notes: Iterable[str], stream: TextIO | None = None) -> None:
    """Write each of ``notes`` as a line to ``stream``, by default the standard output."""
    file = sys.stdout if stream is None else stream
    assert file is not None, "a command has a standard output"
    file.write("".join(f"note: {printable(note)}\n" for note in notes))  # one write: ranks share the screen
    file.flush()


def is_first_rank() -> bool:
    """Whether this process prints messages that all ranks have in common."""
    return Launched.here().rank == 0


def not_installed(error: ModuleNotFoundError) -> int:
    """Report a missing package, as in a Python outside the environment; return the exit status, 2.

    Raises ``error`` itself if the module belongs to this repository: that is a bug.
    """
    name = error.name or ""
    if name.partition(".")[0] in ("mm", "checkpoint"):
        raise error
    if is_first_rank():
        sys.stderr.write(f"error: {sys.executable} has no package {name!r}, so it is not the environment of this "
                         f"repository; run \"source .venv/bin/activate\" (\"make .venv/.ready\" makes it), and "
                         f"start this command again\n")
    return 2


def not_loaded(error: RuntimeError) -> int:
    """Report a device's extension that torch cannot load while it is imported; return the exit status, 2.

    Raises ``error`` itself if it is any other error.
    """
    start, _, rest = str(error).partition(_EXTENSION)
    if start or not rest:
        raise error
    name = rest.partition(". ")[0]
    if is_first_rank():
        sys.stderr.write(
            f"error: torch cannot load its extension {name} ({type(error.__cause__).__name__}: {error.__cause__}). If "
            f"this machine has devices for it, run the set-up of their software first (for Ascend: \"source "
            f"/usr/local/Ascend/cann/set_env.sh\"); if not, set TORCH_DEVICE_BACKEND_AUTOLOAD=0 or uninstall {name}\n")
    return 2


def print_notes_once(notes: Iterable[str]) -> None:
    """Print, on rank 0 only, notes that every rank has.  They go to the standard error."""
    if is_first_rank():
        print_notes(notes, sys.stderr)


def refused(error: UserError) -> int:
    """Print an error that every rank hits before communication starts; return the exit status, 2.

    The first rank of each node prints it immediately.  The others wait until the launcher ends them, so it appears once
    per node.
    """
    if Launched.here().local_rank:
        _wait_for_the_launcher()
    return _report(error)


def status_of(action: Callable[[], int]) -> int:
    """Run ``action`` on all ranks and return its status, or 2 after a UserError, which is printed.

    Exits the process after a failure that ends all ranks (ReportedError).
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
        leave(1)  # in a normal exit, process groups that other threads still hold would abort this process


def _wait_for_the_launcher() -> None:
    """Sleep while another rank prints the error; its exit makes the launcher end this process.

    The sleep is limited, in case only this rank has found the error.
    """
    time.sleep(_LAUNCHER_SECONDS)


def _report(error: UserError) -> int:
    start = "error: " if is_first_rank() else f"[rank {Launched.here().rank}] error: "
    sys.stderr.write("".join(f"{start}{problem}\n" for problem in error.problems))  # one write: ranks share the screen
    sys.stderr.flush()
    _tell_the_launcher(error.problems)
    return 2


def end_stopped(text: str, status: int) -> int:
    """End a run that has stopped early and saved: tell the launcher why, unless ``status`` is 0; returns ``status``."""
    if status:
        _tell_the_launcher([text])
    return status


def _tell_the_launcher(problems: Sequence[str]) -> None:
    """Write the root cause that torchrun shows, in its format.  Without it, torchrun prints how to get a traceback.

    torchrun exits with 1 and a traceback of its own whenever a rank's exit status is not 0.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    others = f" ({len(problems) - 1} more above)" if len(problems) > 1 else ""
    message = {"message": f"{problems[0]}{others}", "extraInfo": {"timestamp": str(int(time.time()))}}
    Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")
