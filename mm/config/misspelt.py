"""Commands and flags that do not exist, each with the nearest one that does, for command lines that argparse reads.

argparse gives no hints, and if a required flag is misspelt, it only reports that flag as missing.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence

from mm.console import Completed, completed_parser, prepare_parser
from mm.errors import nearest, refuse


def unknown_flag(flag: str, known: Iterable[str], help_of: str = "") -> str:
    """The problem with a flag that is not ``known``; ``help_of`` is the command whose help lists them."""
    return f"{flag} is not a known flag{nearest(flag, known)}; see {help_of}{' ' * bool(help_of)}--help"


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse ``words``, and end the help of every command with the exit statuses.

    Raises UserError for commands and flags that do not exist, and for abbreviated flags.  After any other mistake
    argparse ends the program.
    """
    prepare_parser(parser)
    refuse(misspelt(words, parser.prog, completed_parser(parser)))
    return parser.parse_args(words)


def misspelt(words: Sequence[str], program: str, completed: Completed) -> Iterator[str]:
    """The problem with each flag in ``words`` that does not exist, and with a command that does not."""
    here, place, follows_flag = completed, program, False
    for word in words:
        flag, equals, _ = word.partition("=")
        if word == "--":
            return
        if word.startswith("--"):
            if flag not in here.flags:
                yield unknown_flag(flag, here.flags, place)
        elif word in here.commands:
            here, place = here.commands[word], f"{place} {word}"
        elif here.commands and not follows_flag and not word.startswith("-"):
            one_of = "one of " * (len(here.commands) > 1)
            yield (f"{word!r} is not a command of {place}{nearest(word, here.commands)}; expected {one_of}"
                   f"{', '.join(here.commands)}")
            return
        follows_flag = word.startswith("-") and not equals
