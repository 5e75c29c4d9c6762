"""What the commands have in common on a console: shell completion, and what is a flag.

A completion script holds the flags and their values as they were when it was written, so TAB starts no Python.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
NEGATIVE = re.compile(r"-([\d.\[]|inf|nan)", re.IGNORECASE)
"""How a negative number begins, in any notation."""
_FILES_TOO = "-o default -o bashdefault"
"""Options of ``complete``: where the function offers nothing, offer files."""
_ZSH_START = """(( $+functions[compdef] )) || { autoload -U +X compinit && compinit }
(( $+functions[complete] )) || { autoload -U +X bashcompinit && bashcompinit }
"""
"""Loads what the function needs in zsh, unless that is loaded already: compinit takes a moment."""


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


def whole_number(text: str) -> int | None:
    """The number of at least 0 that ``text`` is; None for other text, and above 18 digits."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def is_flag(word: str) -> bool:
    """Whether a word of a command line is a flag, not a value such as -, -1e-3, -.5, -inf or the -1, of a list."""
    return word.startswith("-") and word != "-" and not NEGATIVE.match(word)
