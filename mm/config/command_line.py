"""The frame of every command: the fields of a frozen dataclass are its flags, and all problems are reported together.

The markers of a field are in ``mm.config.parse``, flags of other programs in ``mm.config.mindspeed``.
"""

import dataclasses
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from mm.config.mindspeed import Fixed, FlagRow, Inert, SameAs
from mm.config.other_trainers import here
from mm.config.parse import (
    APPENDS,
    FIRST,
    Excludes,
    Group,
    Idle,
    Needs,
    Positional,
    changed,
    choices,
    converted,
    expected,
    fields_of,
    section_of,
)
from mm.console import COMMON, COMPLETION, NEEDED, SHELLS, STATUSES, Completed, completion_script, is_flag
from mm.environment import version_line
from mm.errors import NoEffect, UserError, nearest, refuse

Built = TypeVar("Built")

Rows = Mapping[str, Sequence[tuple[str, str]]]
"""Title of a group in the help -> each flag with its meaning."""
_COMMON_ROWS = (
    ("-h, --help", "print this help, and exit"),
    ("--version", "print the version of this program and of its libraries, and exit"),
    (f"{COMPLETION} {'|'.join(SHELLS)}", "print a script that completes this command in a shell (docs/install.md)"),
)
_INDENT = 26
_LONGEST_SHOWN = 80


def flag_name(field_name: str) -> str:
    """``lr_decay_style`` -> ``--lr-decay-style``."""
    return "--" + field_name.replace("_", "-")


@dataclass(frozen=True)
class Flag:
    """One flag of a command: a field, which may be inside of another field."""

    name: str
    """With the dashes; for a positional field, its name in the help."""
    path: tuple[str, ...]
    field: FieldInfo
    group: str
    """Title of its group in the help."""
    meaning: str
    section: tuple[str, ...] = ()
    """Path of the optional section that it is in; it is not required where no flag of the section is given."""

    @property
    def is_positional(self) -> bool:
        return any(isinstance(one, Positional) for one in self.field.metadata)

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value; fields of sections are written with true or false, as in MindSpeed-MM."""
        return self.field.annotation is bool and "." not in self.name

    @property
    def takes_many(self) -> bool:
        return typing.get_origin(self.field.annotation) is tuple and "." not in self.name

    @property
    def words(self) -> Sequence[str]:
        """The legal words of its value, if there are only some."""
        is_bool = bool in (self.field.annotation, *typing.get_args(self.field.annotation))
        return choices(self.field) or (("true", "false") if is_bool and not self.is_switch else ())

    @property
    def row(self) -> tuple[str, str]:
        """How the help shows it."""
        shown = "" if self.field.is_required() or self.is_switch else str(self.field.default).strip("(,)")
        default = "" if shown in ("None", "", "PydanticUndefined") else f" (default {shown})"
        metavar = "" if self.is_switch or self.is_positional else (
            "|".join(self.words) or self.name.replace(".", "-").rpartition("-")[2].upper())
        return f"{self.name} {metavar}".strip(), self.meaning + default

    def problem(self, occurrences: Sequence[Sequence[str]]) -> str | None:
        """The problem with the words that follow it, if any."""
        if self.is_switch:
            return _lone_word_problem(self.name, occurrences)
        words, legal = occurrences[-1], expected(self.field).removesuffix(" or null")
        text, legal_words = " ".join(words), choices(self.field)
        if not words or not all(word.strip() for word in words):
            return f"{self.name} has {'an empty value' if words else 'no value'}; expected {self.meaning}"
        if len(words) > 1 and not self.takes_many:
            return f"{self.name} has {len(words)} values ({text}); expected one: {self.meaning}"
        try:
            converted(words if self.takes_many else text, self.field, strict=False)
        except ValidationError as error:
            if self.takes_many and legal_words:
                text = next(word for word in words if word not in legal_words)
            text = text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."
            kind = error.errors()[0]["type"]
            is_word = kind == "literal_error" or kind.endswith("_parsing")
            return (f"{self.name} is {repr(text) if is_word else text}; expected {legal}"
                    f"{nearest(text, legal_words)}")
        return None


def _flags(cls: type, start: str, path: tuple[str, ...] = (), group: str = "Options", meaning: str = "",
           section: tuple[str, ...] = ()) -> Iterator[Flag]:
    for own, field in fields_of(cls).items():
        group = next((one.title for one in field.metadata if isinstance(one, Group)), group)
        said, here = field.description or meaning, (*path, own)
        if (inner := section_of(field)) is not None:
            yield from _flags(inner, f"{start}{own}.", here, group, said, here if field.default is None else section)
            continue
        place = next((one.name for one in field.metadata if isinstance(one, Positional)), "")
        name = place or (start + own if path or len(start) > 2 else flag_name(own))
        is_first = FIRST in field.metadata or (field.is_required() and not section)
        yield Flag(name, here, field, NEEDED if is_first else group, said, section)


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
    """The flags of one command, as the fields of ``cls``."""

    name: str
    description: str
    cls: type[Built]
    usage: str = "[flags]"
    """What follows the program's name in the help."""
    foreign: Mapping[str, FlagRow] = dataclasses.field(default_factory=dict[str, FlagRow])
    """Flags that are no fields."""
    start: str = "--"
    """How each flag begins."""
    one_of: Sequence[tuple[str, str]] = ()
    """Pairs of flags of which one must be given."""
    tail: "CommandLine[Any] | None" = None
    """The command whose flags follow after ``--``."""

    @cached_property
    def flags(self) -> Mapping[str, Flag]:
        """The flags by name."""
        return {one.name: one for one in _flags(self.cls, self.start)}

    @property
    def completed(self) -> Completed:
        """What a shell completes: every flag, with its words."""
        own = {name: one.words for name, one in self.flags.items() if not one.is_positional}
        return Completed({**own, **COMMON}, {"--": self.tail.completed} if self.tail else {})

    @property
    def rows(self) -> Rows:
        """The flags in the help, by group."""
        found: dict[str, list[tuple[str, str]]] = {NEEDED: []}
        for one in self.flags.values():
            found.setdefault(one.group, []).append(one.row)
        return {title: rows for title, rows in found.items() if rows}

    def own_of(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """The words of this command's own flags, and all others."""
        own, others = list[str](), list[str]()
        target = others
        for word in argv:
            if is_flag(word):
                name = word.partition("=")[0]
                target = own if name in self.flags or name in COMMON else others
            target.append(word)
        return own, others

    def split(self, argv: Sequence[str]) -> Words:
        """Split the command line into flags and their values; after --help and the like, print and exit."""
        _answer_common(argv, self)
        place = next((name for name, one in self.flags.items() if one.is_positional), None)
        given: dict[str, list[list[str]]] = {}
        strays: list[str] = []
        values, room = strays, 0
        for word in argv:
            name, equals, value = word.partition("=")
            if not is_flag(word) and len(values) < room:
                values.append(word)
            elif not is_flag(word):
                (strays if place is None else given.setdefault(place, [[]])[0]).append(word)
            elif name in self.flags or name in self.foreign:
                given.setdefault(name, []).append(values := [value] if equals else [])
                room = self._room(name, place is not None) if not equals else 1
            else:
                strays.append(word)
                values, room = [], len(argv)  # the words after an unknown flag are taken as its values
        return Words(given, strays)

    def _room(self, name: str, has_places: bool) -> int:
        """Most words that a flag takes; the check counts them, except where others have a place of their own."""
        flag = self.flags.get(name)
        if flag is None or flag.takes_many or not has_places:
            return 1 << 30
        return 0 if flag.is_switch else 1

    def read(self, words: Words) -> Built:
        """Check each flag alone; raises UserError with every problem.  ``rule_problems`` has rules between flags."""
        problems = self._stray_problems(words.strays)
        values: dict[str, Any] = {}
        for name, occurrences in words.given.items():
            row = self.foreign.get(name)
            flag = self.flags.get(row.flag if isinstance(row, SameAs) else name)
            if flag and APPENDS in flag.field.metadata:
                occurrences = [[word for one in occurrences for word in one]]
            last = occurrences[-1]
            match row:
                case Inert():
                    pass
                case SameAs(_, str(value)) if flag:
                    problems += filter(None, [_lone_word_problem(name, occurrences)])
                    if flag.name not in words.given:
                        values[flag.path[0]] = value
                case Fixed((), why):
                    problems.append(f"{name} is not available here: {why}")
                case Fixed(supported, why):
                    if last != list(supported):
                        value = " ".join(last)
                        problems.append(f"{name} is {value if value.isdecimal() else repr(value)}; {why}")
                case _ if flag and (problem := dataclasses.replace(flag, name=name).problem(occurrences)):
                    problems.append(problem)
                case _ if flag:
                    inner = values
                    for section in flag.path[:-1]:
                        inner = inner.setdefault(section, {})
                    inner[flag.path[-1]] = last if flag.takes_many else last[0] if last else True
                case _:
                    raise AssertionError(f"{name} stands for no flag")
        refuse([*problems, *self._missing(words.given)])
        return TypeAdapter(self.cls).validate_python(values)

    def _missing(self, given: Mapping[str, Any]) -> Iterator[str]:
        begun = {self.flags[name].section for name in given if name in self.flags}
        for name, one in self.flags.items():
            if one.field.is_required() and name not in given and (not one.section or one.section in begun):
                yield f"{name} is missing: {one.meaning}"
        for name, other in self.one_of:
            if name not in given and other not in given:
                yield f"{name} is missing: {self.flags[name].meaning.partition(';')[0]}; or give {other}"

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

    def _stray_problems(self, strays: Sequence[str]) -> list[str]:
        """Words without a flag, and unknown flags with the nearest known flag."""
        known = [*self.flags, *(flag for flag, row in self.foreign.items() if not isinstance(row, Fixed)), *COMMON]
        lost = [f"{word!r} on the command line belongs to no flag" for word in strays if not is_flag(word)]
        unknown = [word.partition("=")[0] for word in strays if is_flag(word)]
        return lost[:1] + [f"{flag} is here: {answer}" if (answer := here(flag)) and self.foreign else
                           f"{flag} is not a known flag{nearest(flag, known)}; see {self.name} --help"
                           for flag in unknown]


@dataclass(frozen=True)
class Commands:
    """A command that consists of others."""

    name: str
    description: str
    commands: Mapping[str, "Commands | CommandLine[Any]"]
    without: CommandLine[Any] | None = None
    """The command if there is no word before the first flag."""
    usage: str = "COMMAND ..."

    @property
    def rows(self) -> Rows:
        """The commands and flags in the help."""
        commands = [(name, one.description.partition(".  ")[0]) for name, one in self.commands.items()]
        return {"Commands": commands, **(self.without.rows if self.without else {})}

    @property
    def completed(self) -> Completed:
        """What a shell completes."""
        lines = [one for one in (self.without and self.without.tail, self.without) if one]
        own = {flag: words for one in lines for flag, words in one.completed.flags.items()}
        return Completed({**own, **COMMON}, {name: one.completed for name, one in self.commands.items()})

    def find(self, words: Sequence[str]) -> tuple[CommandLine[Any], Sequence[str]]:
        """The command that ``words`` begin with, and the words after it; raises UserError if there is none."""
        first = words[0] if words else ""
        if (found := self.commands.get(first)) is not None:
            return found.find(words[1:]) if isinstance(found, Commands) else (found, words[1:])
        if self.without is not None and is_flag(first) and first.partition("=")[0] not in ("-h", *COMMON):
            return self.without, words
        _answer_common(words, self)
        what = f"{first!r} is not a command of {self.name}{nearest(first, self.commands)}" if first else (
            f"{self.name} needs a command")
        raise UserError(f"{what}; expected {'one of ' * (len(self.commands) > 1)}{', '.join(self.commands)}")

    def read(self, words: Sequence[str]) -> Any:
        """The settings of the command that ``words`` name, an instance of its class; raises UserError."""
        line, rest = self.find(words)
        args = line.read(line.split(rest))
        refuse(rule_problems(args))
        return args


def _lone_word_problem(flag: str, occurrences: Sequence[Sequence[str]]) -> str | None:
    """The problem if words follow a flag that takes none."""
    given = [word for one in occurrences for word in one]
    return f"{flag} takes no value, but has {' '.join(given)!r}; give it alone, or not at all" if given else None


def _marked(args: object) -> Iterator[tuple[str, Any]]:
    """Each field that is set, with each of its markers."""
    fields = fields_of(type(args))
    return ((name, marker) for name in changed(args) for marker in fields[name].metadata)


def rule_problems(args: object) -> Iterator[str]:
    """Flags that lack another one, or contradict one; ``args`` is an instance of a command's class."""
    given = changed(args)
    for name, marker in _marked(args):
        if isinstance(marker, Needs) and marker.other not in given:
            flag, other = flag_name(name), flag_name(marker.other)
            yield f"{flag} is given, but {other} is missing: add {other}, or remove {flag}"
        elif isinstance(marker, Excludes) and marker.other in given:
            yield f"{flag_name(marker.other)} and {flag_name(name)} are both given; keep one"


def rule_notes(args: object) -> Iterator[str]:
    """Flags that have no effect without another one."""
    given, idle = changed(args), dict[str, list[str]]()
    for name, marker in _marked(args):
        if isinstance(marker, Idle) and (
                marker.other not in given if marker.value is None else getattr(args, marker.other) != marker.value):
            other = f"{flag_name(marker.other)} {marker.value or ''}".rstrip()
            idle.setdefault(other, []).append(flag_name(name))
    yield from (NoEffect(flags, f"only with {other}") for other, flags in idle.items())


def _answer_common(words: Sequence[str], command: Commands | CommandLine[Any]) -> None:
    """Print what --help, --version or --print-completion asks for, and exit; return if ``words`` have none of them."""
    program = command.name.partition(" ")[0]
    for number, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag in ("-h", "--help"):
            printed = _help_text(command)
        elif flag == "--version":
            printed = f"{version_line(program)}\n"
        elif flag == COMPLETION and program == command.name:
            shell = value or " ".join(words[number + 1 : number + 2])
            if shell not in SHELLS:
                raise UserError(f"{COMPLETION} is {shell!r}; expected {' or '.join(SHELLS)}")
            printed = completion_script(shell, program, command.completed)
        else:
            continue
        sys.stdout.write(printed)
        raise SystemExit(0)


def _help_text(command: Commands | CommandLine[Any]) -> str:
    width = shutil.get_terminal_size().columns - 2

    def row(flag: str, meaning: str) -> str:
        start = f"  {flag}  "
        first = start.ljust(_INDENT) if len(start) <= _INDENT else f"{start.rstrip()}\n{' ' * _INDENT}"
        text = textwrap.wrap(meaning, max(width - _INDENT, 20), break_on_hyphens=False) or [""]
        return first + f"\n{' ' * _INDENT}".join(text)

    usage = f"usage: {command.name} {command.usage}"
    parts = [textwrap.fill(usage, width, subsequent_indent="    ", break_on_hyphens=False),
             textwrap.fill(command.description, width, break_on_hyphens=False)]
    parts += [f"{title}:\n" + "\n".join(row(*one) for one in rows)
              for title, rows in {**command.rows, "Help": _COMMON_ROWS}.items()]
    return "\n\n".join([*parts, textwrap.fill(STATUSES, width, break_on_hyphens=False)]) + "\n"
