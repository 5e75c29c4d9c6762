"""What the commands have in common on a console: words that are flags, shell completion, and the progress of long work.

A completion script lists flags and values, so TAB starts no Python.  Progress is a bar on a terminal; in a job's log it
is a line after ten seconds and then every half minute.
"""

import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from types import TracebackType
from typing import TypeVar

from mm.environment import without_collection
from mm.errors import printable

STATUSES = ("Exit status: 0 = done; 1 = failed (mm-convert diff: different; mm-doctor: a fault); 2 = the command line, "
            "a file or the machine does not fit; 130, 138, 143 = ended by Ctrl-C, SIGUSR1, SIGTERM.  docs/install.md "
            "lists them all.")
"""The last line of each help."""
NEEDED = "What the command needs"
"""Title of the flags that come first in the help."""
COMPLETION = "--print-completion"
SHELLS = ("bash", "zsh")
COMMON: Mapping[str, Sequence[str]] = {"--help": (), "--version": (), COMPLETION: SHELLS}
"""The flags of every command, with the words that they take."""
_MOST_DIGITS = 18
_NEGATIVE = re.compile(r"-([\d.\[]|inf|nan)", re.IGNORECASE)
"""How a negative number begins, in any notation."""


def whole_number(text: str) -> int | None:
    """The number of at least 0 that ``text`` is; None for other text, and above 18 digits."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def is_flag(word: str) -> bool:
    """Whether a word of a command line is a flag, not a value such as -, -1e-3, -.5, -inf or the -1, of a list."""
    return word.startswith("-") and word != "-" and not _NEGATIVE.match(word)


# Shell completion

_FILES_TOO = "-o default -o bashdefault"
"""Options of ``complete``: where the function offers nothing, offer files."""
_ZSH_START = """(( $+functions[compdef] )) || { autoload -U +X compinit && compinit }
(( $+functions[complete] )) || { autoload -U +X bashcompinit && bashcompinit }
"""


@dataclass(frozen=True)
class Completed:
    """What may follow a command on the command line."""

    flags: Mapping[str, Sequence[str]]
    """Flag -> the legal words of its value; empty for files, and for flags without a value."""
    commands: Mapping[str, "Completed"] = field(default_factory=dict[str, "Completed"])
    """What may follow each of its commands."""

    def places(self, place: str = "") -> Iterator[tuple[str, "Completed"]]:
        """This and all nested commands, each with the words that lead to it, such as "/index"."""
        yield place, self
        for word, command in self.commands.items():
            yield from command.places(f"{place}/{word}")


def completion_script(shell: str, program: str, completed: Completed) -> str:
    """The script for one of ``SHELLS``; zsh runs bash's through its module bashcompinit.

    bash splits ``--flag=value`` before it calls the function.  zsh does not, so there the function does it, and
    ``compset`` restricts completion, also of files, to what follows "=".
    """
    name = f"_{program.replace('-', '_')}"
    places = list(completed.places())
    inner = " | ".join(shlex.quote(place) for place, _ in places[1:]) or "/"

    def cases(offered: Iterable[tuple[str, Iterable[str]]]) -> str:
        return "\n".join(f"            {shlex.quote(case)}) offered={shlex.quote(' '.join(words))} ;;"
                         for case, words in offered)

    flags = cases((place, one.flags) for place, one in places)
    values = cases((f"{place} {flag}", words) for place, one in places for flag, words in one.flags.items() if words)
    commands = cases((f"{place} ", words) for place, one in places
                     if (words := [word for word in one.commands if not word.startswith("-")]))
    start = apart = ""
    end = f"complete {_FILES_TOO} -F {name} {program}\n"
    if shell == "zsh":
        start = _ZSH_START
        apart = '\n    if [[ "$word" == --*=* ]]; then flag="${word%%=*}" word="${word#*=}"; fi'
        end = (f"{name}_zsh() {{\n    compset -P '--*='\n    _bash_complete {_FILES_TOO} -F {name}\n}}\n"
               f"compdef {name}_zsh {program}\n")
    return f"""# Completion of {program}, written by: {program} {COMPLETION} {shell}
{start}{name}() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" place="" flag="" offered="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$place/${{COMP_WORDS[i]}}" in
            {inner}) place="$place/${{COMP_WORDS[i]}}" flag="" ;;
            */-*) flag="${{COMP_WORDS[i]}}" ;;
        esac
    done
    [[ "$word" == "=" ]] && word=""{apart}
    if [[ "$word" == -* ]]; then
        case "$place" in
{flags}
        esac
    else
        case "$place $flag" in
{values}
{commands}
        esac
    fi
    COMPREPLY=($(compgen -W "$offered" -- "$word"))
}}
{end}"""


# Progress

Item = TypeVar("Item")

FIRST_SECONDS = 10.0
"""Seconds before the first line without a terminal."""
EVERY_SECONDS = 30.0
"""Seconds between two lines."""
_DELAY_SECONDS = 2.0
"""Seconds before a bar appears."""
_BEAT_SECONDS = 1.0
"""Seconds between two displays of the time that ``ongoing`` work has taken, on a terminal."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Progress(AbstractContextManager["Progress"]):
    """Context that shows the progress of ``total`` parts of work, of which ``done`` are already done."""

    def __init__(
        self, what: str, total: int | None = None, unit: str = "", done: int = 0, is_shown: bool = True
    ) -> None:
        """``unit``: "B" for bytes, else what is counted, such as "records".  ``total`` is None if unknown.

        ``is_shown`` is False on ranks that show nothing, because another rank does.
        """
        from tqdm import tqdm  # not at the top: mm-doctor also starts where no package is installed

        self.done = done
        self._what, self._total, self._unit, self._done_before = printable(what), total, unit, done
        self._lock, self._is_bytes = Lock(), unit == "B"
        has_terminal = sys.stderr.isatty()
        self._prints = is_shown and not has_terminal
        self._began = time.monotonic()
        self._next_print = self._began + FIRST_SECONDS
        self._has_printed = False
        self._bar = tqdm(total=total, initial=done, desc=self._what, unit="B" if self._is_bytes else f" {unit}",
                         unit_scale=self._is_bytes, unit_divisor=1024, delay=_DELAY_SECONDS,
                         disable=not (is_shown and has_terminal))

    def update(self, count: int = 1) -> None:
        """Count ``count`` more parts as done; any thread may call it."""
        with self._lock:
            self.done += count
            self._bar.update(count)
            now = time.monotonic()
            if self._prints and now >= self._next_print:
                self._next_print, self._has_printed = now + EVERY_SECONDS, True
                self._print(now, self._left(now))

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield ``items``; each counts as done when the next one is requested."""
        with self:
            for item in items:
                yield item
                self.update()

    def __exit__(self, _: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(is_whole=error is None)

    def close(self, is_whole: bool = True) -> None:
        """Remove the bar, or print a last line if any was printed and the work ``is_whole``, not interrupted."""
        self._bar.close()
        if self._has_printed and is_whole:
            self._print(time.monotonic(), " in all")

    def _print(self, now: float, more: str) -> None:
        of_total = f" of {self._counted(self._total)} ({self.done / self._total:.0%})" if self._total else ""
        unit = "" if self._is_bytes else f" {self._unit}"
        _print_line(f"{self._what}: {self._counted(self.done)}{of_total}{unit}, {duration(now - self._began)}{more}")

    def _left(self, now: float) -> str:
        """The time that the rest will take if it goes on like the parts that this process has done."""
        num_done = self.done - self._done_before
        if self._total is None or num_done <= 0 or self.done >= self._total:
            return ""
        return f", about {duration((now - self._began) * (self._total - self.done) / num_done)} left"

    def _counted(self, number: int) -> str:
        if not self._is_bytes:
            return f"{number:,}"
        power = min(max(number.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
        return f"{number / 1024**power:.{1 if power else 0}f} {_UNITS[power]}"


@contextmanager
def ongoing(what: str, is_shown: bool = True) -> Iterator[None]:
    """Show that work without countable parts goes on, and for how long, until the body ends.

    The body must not show a ``Progress`` of its own.
    """
    if not is_shown:
        yield
        return
    ended = Event()
    shows = _show_seconds if sys.stderr.isatty() else _print_seconds
    thread = Thread(target=shows, args=(printable(what), ended), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def loading(is_shown: bool = True, what: str = "loading the libraries") -> Iterator[None]:
    """``ongoing`` for a body that imports modules, which is faster here (``without_collection``)."""
    with without_collection(), ongoing(what, is_shown):
        yield


def _show_seconds(what: str, ended: Event) -> None:
    if ended.wait(_DELAY_SECONDS):
        return
    from tqdm import tqdm

    with tqdm(desc=what, initial=1, bar_format="{desc}: {elapsed}", leave=False) as bar:
        bar.start_t -= _DELAY_SECONDS
        while not ended.wait(_BEAT_SECONDS):
            bar.refresh()


def _print_seconds(what: str, ended: Event) -> None:
    began, seconds = time.monotonic(), FIRST_SECONDS
    while not ended.wait(seconds):
        seconds = EVERY_SECONDS
        _print_line(f"{what}: {duration(time.monotonic() - began)} so far")


def _print_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def duration(seconds: float) -> str:
    """Words for a time: "45 s", "12 min", "2 h 13 min", "3 days 4 h"."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if round(seconds) < 120:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24:,} days {hours % 24} h"
