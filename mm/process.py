"""How a program runs and ends: signals that stop it, its launcher and processes, its messages and its exit status."""

import io
import json
import os
import random
import resource
import secrets
import select
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TextIO

from mm.environment import Launched
from mm.errors import AgreedError, ReportedError, Stopped, StoppedRun, UserError, file_error, printable

if TYPE_CHECKING:
    import psutil


# Signals that ask a program to stop: Ctrl-C, SIGTERM from schedulers, and SIGUSR1, which schedulers send earlier

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_AGAIN_SECONDS = 2.0
"""A signal may come from terminal, launcher and scheduler at once; one this much later is a second request."""
_REMINDER_SECONDS = 1.0
"""Seconds between two checks whether ``Stopped`` was swallowed, as some imports do."""

Handler = signal.Handlers | Callable[[int, FrameType | None], object] | int | None


def status_after(number: int) -> int:
    """The exit status that shells and schedulers expect of a program that a signal has ended."""
    return 128 + number


def shown(number: int) -> str:
    """The signal as users know it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def defer_stopping() -> None:
    """Go on after a signal while this process, which is failing anyway, reports why; a second one still ends it."""
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                signal.signal(number, lambda *_: None)


class StopSignals:
    """Context that handles the signals of ``STOPPING``, except those that this process ignores already.

    The first raises ``Stopped`` in the main thread, repeatedly if third-party code swallows it; while a run defers
    signals, it is only recorded, and the run stops where it can save.  A second one ends the process immediately.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        """When the program began."""
        self.received: int | None = None
        """The signal that came first."""
        self._is_deferring = self._has_raised = self._has_ended = False
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
        """Read the numbers of arriving signals, end the process at a second request, and remind the main thread."""
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


# A launcher, and other processes

_LAUNCHER_SECONDS = 60.0
"""Longest time a rank waits for the launcher to end it.  torchrun needs about a second after a rank has exited."""
_LAUNCHED = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets in its ranks; its value identifies the launch."""
_BEAT_SECONDS = 1.0
_PORTS = range(20_000, 32_768)
"""Below Linux's ephemeral ports (``ip_local_port_range``), which another process may take in the meantime."""


def end_with_launcher() -> None:
    """Make this process end when the torchrun that started it dies, even if torchrun was killed."""
    if _LAUNCHED in os.environ:
        threading.Thread(target=_end_with, args=(_launcher(),), name="launcher's end", daemon=True).start()


def _launcher() -> "psutil.Process | None":
    """torchrun's process, or None if it has ended: the nearest ancestor without torchrun's environment."""
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


def free_port() -> int:
    """A TCP port on which nobody listens, drawn at random, so that simultaneous launches get different ones."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("", port))
            return port
    raise OSError(f"no TCP port from {_PORTS[0]} to {_PORTS[-1]} is free")


def open_file_limit() -> int:
    """Raise this process's limit on open files to what the system allows, and return that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 1 << 62 if hard == resource.RLIM_INFINITY else hard


Identity = tuple[str, int, str]
"""Node, process id, and when the process began."""


def node_id() -> str:
    """An id shared by the processes of this machine that see each other's process ids."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)


def began(pid: int) -> str | None:
    """When a process began, in clock ticks since boot, as ids are reused; None if there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def own_identity() -> Identity:
    """This process."""
    return node_id(), os.getpid(), began(os.getpid()) or ""


def has_ended(process: Identity) -> bool:
    """Whether a process is known to have ended: only for processes of this machine."""
    node, pid, start = process
    return node == node_id() and began(pid) != start


def kill(processes: Iterable[Identity]) -> None:
    """Kill those of the processes that run on this machine."""
    for node, pid, start in processes:
        if node == node_id() and began(pid) == start:
            with suppress(OSError):  # it has just ended, or is another user's
                os.kill(pid, signal.SIGKILL)


# The end of a program: its messages and exit status

_OUTPUT = 1
"""The file descriptor of the standard output."""
_EXTENSION = "Failed to load the backend extension: "
"""How torch's message begins if it cannot load the extension of a device."""


_QUIET = (
    # Intended: torch's fused optimizer and kernels are used.
    (r"(Transformer Engine and )?Apex (is|are) not installed", UserWarning, "megatron"),
    # A default of megatron's own.
    ("full scope is deprecated", UserWarning, "megatron"),
    # megatron asks each parameter for its gradient, also those that are views.
    (r"The \.grad attribute of a Tensor that is not a leaf", UserWarning, "megatron"),
    # The new names are absent in the oldest torch that is supported.
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning, "torch"),
)
"""Warnings of libraries that no user can act on: message, category, and module that it names."""


def run_command(
    command: Callable[[], int], kept: Callable[[], str], is_rank: bool = False, signals: StopSignals | None = None
) -> int:
    """Run a program; return its exit status: that of ``command``, 2 after a UserError, or 128 plus a signal's number.

    After a signal, one rank prints what remains of the work (``kept``).  ``is_rank``: the process may be in a
    collective, so it exits without returning.  ``signals``: for a command that defers them.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may have fewer characters than the data
    for message, category, module in _QUIET:
        warnings.filterwarnings("ignore", message, category, module, append=True)  # after the user's own filters
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
    """End this process without Python's exit handlers; removes multiprocessing's temporary folder, as one would."""
    if (multiprocessing := sys.modules.get("multiprocessing.util")) is not None:
        with suppress(OSError):  # it may be on a full disk
            shutil.rmtree(multiprocessing.get_temp_dir())
    os._exit(status)


def print_notes(notes: Iterable[str], stream: TextIO | None = None) -> None:
    """Write each of ``notes`` as a line to ``stream``, by default the standard output."""
    file = stream or sys.stdout
    file.write("".join(f"note: {printable(note)}\n" for note in notes))  # one write: ranks share the screen
    file.flush()


def is_first_rank() -> bool:
    """Whether this process prints messages that all ranks have in common."""
    return Launched.here().rank == 0


def not_installed(error: ModuleNotFoundError) -> int:
    """Report a missing package and return the exit status, 2; a missing module of this repository is raised."""
    name = error.name or ""
    if name.partition(".")[0] in ("mm", "checkpoint"):
        raise error
    if is_first_rank():
        sys.stderr.write(f"error: {sys.executable} has no package {name!r}, so it is not the environment of this "
                         f"repository; run \"source .venv/bin/activate\" (\"make .venv/.ready\" makes it), and "
                         f"start this command again\n")
    return 2


def not_loaded(error: RuntimeError) -> int:
    """Report a device's extension that torch cannot import and return the exit status, 2; other errors are raised."""
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


def refused(error: UserError) -> int:
    """Print an error that every rank hits before communication starts, once per node; return the exit status, 2."""
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
    """Sleep until the launcher ends this process, at most for a while: perhaps only this rank has found the error."""
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
    """Write the root cause that torchrun shows, in its format; without it, torchrun prints how to get a traceback."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    others = f" ({len(problems) - 1} more above)" if len(problems) > 1 else ""
    message = {"message": f"{problems[0]}{others}", "extraInfo": {"timestamp": str(int(time.time()))}}
    Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")
