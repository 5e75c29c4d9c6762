"""A command line read as a frozen dataclass: every field is one flag, and all problems are reported together.

``mm.config.flags`` has the trainer's, ``mm.config.generate`` the generator's.  Flags of other programs that do nothing
here are in ``mm.config.foreign``.
"""

import argparse
import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from mm.config.foreign import Fixed, FlagRow, Inert, SameAs
from mm.config.misspelt import unknown_flag
from mm.config.notes import NoEffect
from mm.config.schema import NUMBERS, choices, converted, expected, fields_of
from mm.console import COMPLETION, SHELLS, Completed, add_common_flags, is_flag, whole_number
from mm.environment import version_line
from mm.errors import nearest, refuse

Built = TypeVar("Built")

FIRST_TITLE = "What every run needs"
"""Title of the flags that stand first in the help."""


def _field_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def flag_name(field_name: str) -> str:
    """``lr_decay_style`` -> ``--lr-decay-style``."""
    return "--" + field_name.replace("_", "-")


class Words(NamedTuple):
    """The command line, split and unchecked."""

    given: Mapping[str, list[list[str]]]
    """Known flag -> the words after it, one list for each time that it is given."""
    strays: Sequence[str]
    """Unknown flags and words that belong to no flag."""

    def last(self, flag: str) -> str | None:
        """The first word after the last occurrence of a flag, unchecked; None if there is none."""
        return next(iter(self.given.get(flag, [[]])[-1]), None)


@dataclass(frozen=True)
class CommandLine(Generic[Built]):
    """The flags of one program, as the fields of ``cls``."""

    name: str
    description: str
    usage: str
    """What follows the program's name in the help."""
    cls: type[Built]
    foreign: Mapping[str, FlagRow]
    """Flags that are no fields."""
    groups: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """The first field of each group in the help -> its title; without groups, all flags stand together."""
    first: Sequence[str] = ()
    """Fields that stand before the groups."""

    @cached_property
    def fields(self) -> Mapping[str, FieldInfo]:
        """The fields by flag."""
        return {flag_name(name): field for name, field in fields_of(self.cls).items()}

    @property
    def completed(self) -> Completed:
        """What a shell completes: every flag, with its words."""
        values = {flag: choices(field) for flag, field in self.fields.items()}
        return Completed({**values, "--help": (), "--version": (), COMPLETION: SHELLS})

    def split(self, argv: Sequence[str]) -> Words:
        """Split the command line into flags and their values."""
        found, strays = self._parser.parse_known_args(list(argv))
        return Words(vars(found), strays)

    def read(self, words: Words) -> Built:
        """Check each flag alone; raises UserError with every problem.  Rules between flags are the caller's."""
        problems = self._stray_problems(words.strays)
        values: dict[str, Any] = {}
        for flag, occurrences in words.given.items():
            last, row = occurrences[-1], self.foreign.get(flag)
            ours = row.flag if isinstance(row, SameAs) else flag
            match row:
                case Inert():
                    pass
                case SameAs(ours, str(value)):
                    problems += _lone_word_problems(flag, occurrences)
                    values.setdefault(_field_name(ours), value)  # the flag itself takes precedence, before or after
                case Fixed((), why):
                    problems.append(f"{flag} is not available here: {why}")
                case Fixed(supported, why):
                    if last != list(supported):
                        value = " ".join(last)
                        problems.append(f"{flag} is {value if value.isdecimal() else repr(value)}; {why}")
                case _ if problem := _value_problem(flag, self.fields[ours], occurrences):
                    problems.append(problem)
                case _:
                    value = last if _takes_many(self.fields[ours]) else last[0] if last else True
                    values[_field_name(ours)] = value
        problems += (f"{flag} is missing: {field.description}" for flag, field in self.fields.items()
                     if field.is_required() and flag not in words.given)
        refuse(problems)
        return TypeAdapter(self.cls).validate_python(values)

    def notes(self, words: Words) -> Iterator[str]:
        """Which flags have no effect, or are given more than once."""
        inert: dict[str, list[str]] = {}
        for flag, occurrences in words.given.items():
            row = self.foreign.get(flag)
            if isinstance(row, Inert):
                inert.setdefault(row.why, []).append(flag)
            elif any(one != occurrences[-1] for one in occurrences):
                texts = ", ".join(" ".join(one) for one in occurrences)
                yield f"{flag} is given more than once ({texts}); the last one is used"
        yield from (NoEffect(flags, why) for why, flags in inert.items())

    @cached_property
    def _parser(self) -> argparse.ArgumentParser:
        """All known flags, each taking any number of strings: values are checked later, all together."""
        parser = argparse.ArgumentParser(
            self.name, description=self.description, usage=f"%(prog)s {self.usage}",
            allow_abbrev=False, argument_default=argparse.SUPPRESS, formatter_class=_Help)
        add_common_flags(parser, version_line(self.name), self.name.replace("mm.", "mm-"), lambda: self.completed)
        places = self._places(parser)
        for flag, field in self.fields.items():
            is_switch = field.annotation is bool
            has_default = field.default not in (None, ()) and not is_switch and not field.is_required()
            shown = str(field.default).strip("(,)")
            default = f" (default {shown})" if has_default else ""
            metavar = "" if is_switch else "|".join(choices(field)) or flag.rpartition("-")[2].upper()
            places[flag](flag, dest=flag, nargs="*", action="append", metavar=metavar,
                         help=f"{field.description}{default}".replace("%", "%%"))
        for flag in self.foreign:
            parser.add_argument(flag, dest=flag, nargs="*", action="append", help=argparse.SUPPRESS)
        return parser

    def _places(self, parser: argparse.ArgumentParser) -> Mapping[str, Callable[..., Any]]:
        """Flag -> the function that adds it to its group in the help."""
        found: dict[str, Callable[..., Any]] = {}
        first = parser.add_argument_group(FIRST_TITLE).add_argument if self.first else parser.add_argument
        at = parser.add_argument
        for name in fields_of(self.cls):
            at = parser.add_argument_group(self.groups[name]).add_argument if name in self.groups else at
            found[flag_name(name)] = first if name in self.first else at
        return found

    def _stray_problems(self, strays: Sequence[str]) -> list[str]:
        """Unknown flags with the nearest known flag.  Words after an unknown flag are taken as its values."""
        known = [*self.fields, *(flag for flag, row in self.foreign.items() if not isinstance(row, Fixed))]
        lost = [f"{word!r} on the command line belongs to no flag" for word in strays[:1] if not is_flag(word)]
        unknown = [word.partition("=")[0] for word in strays if is_flag(word)]
        return lost + [unknown_flag(flag, known) for flag in unknown]


def _lone_word_problems(flag: str, occurrences: list[list[str]]) -> list[str]:
    """A problem if words follow a flag that takes none."""
    given = [word for one in occurrences for word in one]
    return [f"{flag} takes no value, but has {' '.join(given)!r}; give it alone, or not at all"] if given else []


def _value_problem(flag: str, field: FieldInfo, occurrences: list[list[str]]) -> str | None:
    """The problem with the words that follow a flag, if any."""
    last = occurrences[-1]
    if field.annotation is bool:
        return next(iter(_lone_word_problems(flag, occurrences)), None)
    if field.title == NUMBERS:
        return None if last and None not in map(whole_number, last) else (
            f"{flag} is {' '.join(last)!r}; expected {NUMBERS}")
    if _takes_many(field):
        legal = choices(field)
        if not last or not all(word.strip() for word in last):
            return f"{flag} has an empty word; expected {expected(field)}"
        wrong = next((word for word in last if legal and word not in legal), None)
        return None if wrong is None else f"{flag} has {wrong!r}; expected {expected(field)}{nearest(wrong, legal)}"
    if len(last) != 1:
        what = f"has {len(last)} values ({' '.join(last)})" if last else "has no value"
        return f"{flag} {what}; expected one: {field.description}"
    legal = expected(field).removesuffix(" or null")
    if legal == "a string" and not last[0].strip():
        return f"{flag} is empty; expected {field.description}"
    try:
        converted(last[0], field, strict=False)
    except ValidationError as error:
        kind = error.errors()[0]["type"]
        is_word = kind == "literal_error" or kind.endswith("_parsing")
        text = last[0] if len(last[0]) <= 80 else f"{last[0][:77]}..."
        return f"{flag} is {repr(text) if is_word else text}; expected {legal}"
    return None


def _takes_many(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is tuple


class _Help(argparse.HelpFormatter):
    """Shows one value per flag, although the parser takes any number of them."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar or "")
