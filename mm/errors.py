"""One exception for everything that a user can fix, and how problems are collected into it; notes on valid settings.

Notes on what changes results are printed at every start.  Settings without effect are only counted there, and listed
on request.
"""

import difflib
import errno
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

Given = TypeVar("Given")
Value = TypeVar("Value")

_CUTOFF = 0.6
"""How similar words must be (``difflib``'s ratio) for one to be a misspelling of the other."""
_LONGEST_NAME = 500
"""Characters of a file's name in a message: files of unknown origin may name others, at any length."""
MAX_PROBLEMS = 20
"""Most problems reported for one file or dataset: if every record is wrong, thousands of lines help nobody."""


class UserError(ValueError):
    """A mistake in the user's input: flags, JSON, data, checkpoints, environment.

    ``problems`` holds every problem found.  Each is a full sentence: what was found, where, what was expected and how
    to fix it.  Entry points print them without a traceback and exit with status 2.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = tuple(map(printable, (problems,) if isinstance(problems, str) else problems))
        super().__init__("\n".join(self.problems))


_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, marks that change the writing direction, and lone surrogates."""
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@\"']*@")
"""``user:password@`` of a URL."""
_SIGNED = re.compile(
    r"([?&][^=&#\s]*(?:token|secret|passw|credential|signature|key)[^=&#\s]*=)[^&#\s\"']+", re.IGNORECASE)
"""A secret in the query of a URL, as in a signed link."""
HIDDEN = "[hidden]"


def printable(text: str) -> str:
    """Make ``text`` safe for a terminal or a log.

    Characters that move the cursor, hide text or cannot be encoded become escapes, and credentials are hidden.
    """
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], redacted(text))


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: "1 file", "1,339 tensors"; ``plural``: unless it is the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def redacted(text: str) -> str:
    """``text`` with the credentials in its URLs hidden."""
    if "://" not in text:
        return text
    return _SIGNED.sub(rf"\1{HIDDEN}", _CREDENTIALS.sub(f"{HIDDEN}@", text))


class AgreedError(UserError):
    """A UserError that every rank raises with the same problems, so only rank 0 prints it."""


class Stopped(KeyboardInterrupt):
    """A signal that asks the program to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StoppedRun(Stopped):
    """The same, on the one rank that reports it; it ends all ranks."""


class ReportedError(Exception):
    """Any other failure on this rank, raised after it has been reported and has ended all ranks."""


def refuse(problems: Iterable[str]) -> None:
    """Raise UserError with ``problems``, each once, if there are any."""
    if found := dict.fromkeys(problems):
        raise UserError(found)


@contextmanager
def collected(problems: list[str], prefix: str = "") -> Iterator[None]:
    """Append errors raised inside to ``problems``, so that all problems are reported together."""
    try:
        yield
    except UserError as error:
        problems += [prefix + problem for problem in error.problems]
    except OSError as error:
        # only a failed opening names the file, not a failed read
        problems.append(f"{prefix}{error.filename or 'a file'}: cannot be read: {error.strerror or error}")


def attempt(read: Callable[[Given], Value], given: Given | None, problems: list[str]) -> Value | None:
    """The result of ``read``, or None if nothing is ``given`` or after adding its ``problems``."""
    with collected(problems):
        return read(given) if given else None
    return None


def file_error(error: OSError) -> UserError | None:
    """The message about a file that cannot be read or written; None if ``error`` is not about a file."""
    if error.filename is None:
        return None
    return UserError(f"{str(error.filename)[:_LONGEST_NAME]}: cannot be read or written: {error.strerror}; repair or "
                     f"replace it, or give another path")


@contextmanager
def reading() -> Iterator[None]:
    """Turn an OSError about a file into ``file_error``; also a decorator."""
    try:
        yield
    except OSError as error:
        if (problem := file_error(error)) is None:
            raise
        raise problem from error


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Prefix the problems of a UserError raised inside with ``place``."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {problem}" for problem in error.problems) from error


@contextmanager
def writing(path: str | Path, flag: str = "") -> Iterator[None]:
    """Turn an OSError into a UserError that names the file, and the ``flag`` that gave its directory."""
    try:
        yield
    except OSError as error:
        cures = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space there, or give another directory")
        cures |= dict.fromkeys((errno.ENXIO, errno.ELOOP), "remove it, or give another directory")
        cure = cures.get(error.errno or 0, "give another directory, or fix its permissions")
        raise UserError(f"{flag and f'{flag}: '}{error.filename or path} cannot be written ({error.strerror}); "
                        f"{cure}") from error


def add_note(error: BaseException, note: str) -> None:
    """Say below ``error`` what the program was doing.

    Without notes (Python 3.10), it becomes a line of the message, unless the error has more than its message.
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args == (str(error),):
        error.args = (f"{error}\n{note}",)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known word closest to ``word``, or an empty string.

    Each piece of ``word`` must be close to a piece of the known word, or begin with it.
    """
    close = difflib.get_close_matches(word, list(known), n=5, cutoff=_CUTOFF)
    match = next((one for one in close if all(
        piece.isdigit() or difflib.get_close_matches(piece, _pieces(one), cutoff=_CUTOFF)
        or piece.startswith(tuple(filter(None, _pieces(one)))) for piece in _pieces(word))), None)
    return f" (did you mean {match!r}?)" if match else ""


def _pieces(word: str) -> list[str]:
    return [piece for piece in re.split(r"[-_.]", word.lower()) if piece]


class NoEffect(str):
    """A note that settings have no effect; it starts with their names."""

    num_settings: int

    def __new__(cls, names: Iterable[str], why: str, file: object = None) -> "NoEffect":
        """``names``: flags, or key paths of ``file``.  ``why``: the reason."""
        names = list(names)
        note = super().__new__(cls, f"{', '.join(names)}{f' of {file}' if file else ''}: no effect: {why}")
        note.num_settings = len(names)
        return note

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle, which would call ``__new__`` with the text alone: rank 0 sends its run to other nodes."""
        return str.__new__, (NoEffect, str(self)), vars(self)


def sorted_notes(notes: Iterable[str]) -> list[str]:
    """Each note once: first what may change results, then what has no effect."""
    return sorted(dict.fromkeys(notes), key=lambda note: isinstance(note, NoEffect))


def notes_at_start(notes: Iterable[str]) -> list[str]:
    """``sorted_notes``, but several notes on settings without effect are replaced by their number."""
    in_order = sorted_notes(notes)
    idle = [note for note in in_order if isinstance(note, NoEffect)]
    if len(idle) <= 1:
        return in_order
    num_settings = sum(note.num_settings for note in idle)
    return [*in_order[: -len(idle)],
            f"{num_settings} settings have no effect here; the same command with --check lists them, with the reasons"]
