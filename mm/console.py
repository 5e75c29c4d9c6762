"""What the commands have in common on a console: ``--version``, the exit statuses in the help, and shell completion.

A completion script holds the flags and their values as they were when it was written, so TAB starts no Python.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STATUSES = ("Exit status: 0 = done; 1 = failed (mm-convert diff: different; mm-doctor: a fault); 2 = the command line, "
            "a file or the machine does not fit; 130, 138, 143 = ended by Ctrl-C, SIGUSR1, SIGTERM.  docs/install.md "
            "lists them all.")
"""The last line of each help."""
NEEDED = "What the command needs"
"""Title of the required flags, which come first in the help."""
COMPLETION = "--print-completion"
SHELLS = ("bash", "zsh")
_MOST_DIGITS = 18
NEGATIVE = re.compile(r"-([\d.\[]|inf|nan)", re.IGNORECASE)
"""How a negative number begins, in any notation; argparse itself takes -1e-3 for a flag."""
_FILES_TOO = "-o default -o bashdefault"
"""Options of ``complete``: where the function offers nothing, offer files."""
_ZSH_START = """(( $+functions[compdef] )) || { autoload -U +X compinit && compinit }
(( $+functions[complete] )) || { autoload -U +X bashcompinit && bashcompinit }
"""
"""Loads what the function needs in zsh, unless that is loaded already: compinit takes a moment."""
_CHOICES = re.compile(r"\{([\w,.-]+)\}")
"""How jsonargparse shows the legal words of a value."""


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


def completed_parser(parser: argparse.ArgumentParser) -> Completed:
    """The flags and commands of ``parser`` that its help shows."""
    flags: dict[str, Sequence[str]] = {}
    commands: dict[str, Completed] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            choices: Mapping[str, argparse.ArgumentParser] = action.choices
            commands |= {name: completed_parser(one) for name, one in choices.items()}
        elif action.help != argparse.SUPPRESS:
            shown = _CHOICES.fullmatch(action.metavar) if isinstance(action.metavar, str) else None
            words = shown[1].split(",") if shown else [str(one) for one in action.choices or ()]
            flags |= dict.fromkeys(action.option_strings, words)
    return Completed(flags, commands)


def completion_script(shell: str, program: str, completed: Completed) -> str:
    """The script for one of ``SHELLS``; zsh runs bash's through its module bashcompinit.

    bash splits ``--flag=value`` before it calls the function.  zsh does not, so there the function does it, and
    ``compset`` restricts completion, also of files, to what follows "=".
    """
    name = f"_{program.replace('-', '_')}"
    places = list(completed.places())
    inner = " | ".join(shlex.quote(place) for place, _ in places[1:]) or "/"
    flags = "\n".join(f"            {shlex.quote(place)}) offered={shlex.quote(' '.join(one.flags))} ;;"
                      for place, one in places)
    values = "\n".join(f"            {shlex.quote(f'{place} {flag}')}) offered={shlex.quote(' '.join(words))} ;;"
                       for place, one in places for flag, words in one.flags.items() if words)
    commands = "\n".join(f"            {shlex.quote(f'{place} ')}) offered={shlex.quote(' '.join(_words(one)))} ;;"
                         for place, one in places if _words(one))
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


def _words(completed: Completed) -> list[str]:
    return [word for word in completed.commands if not word.startswith("-")]


def positive_count(text: str) -> int:
    """Parse a count of at least 1, as the ``type`` of a flag; argparse reports the error."""
    number = whole_number(text)
    if not number:
        raise argparse.ArgumentTypeError(f"is {text[:80]!r}; expected an integer of at least 1")
    return number


def whole_number(text: str) -> int | None:
    """The number of at least 0 that ``text`` is; None for other text, and above 18 digits."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def is_flag(word: str) -> bool:
    """Whether a word of a command line is a flag, not a value such as -1e-3, -.5, -inf or the -1, of a list."""
    return word.startswith("-") and not NEGATIVE.match(word)


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """End the help of ``parser`` and of all its commands with ``STATUSES``, and let flags take ``NEGATIVE`` values."""
    parser.epilog, parser._negative_number_matcher = STATUSES, NEGATIVE
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                prepare_parser(command)


def add_common_flags(
    parser: argparse.ArgumentParser, version: str, program: str, completed: Callable[[], Completed] | None = None
) -> None:  # fmt: skip
    """Add to the ``parser`` of ``program`` the flags and the epilog that all commands have.

    ``completed``: returns what the shell completes, if that is more than the parser's help shows.
    """
    prepare_parser(parser)
    parser.add_argument("--version", action="version", version=version,
                        help="print the version of this program and of its libraries, and exit")

    class Print(argparse.Action):
        """Prints the script and exits, whatever else is on the command line."""

        def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None) -> None:
            found = completed_parser(parser) if completed is None else completed()
            sys.stdout.write(completion_script(values, program, found))
            parser.exit()

    parser.add_argument(COMPLETION, action=Print, choices=SHELLS, default=argparse.SUPPRESS, metavar="|".join(SHELLS),
                        help="print a script that completes this command in a shell (docs/install.md), and exit")
