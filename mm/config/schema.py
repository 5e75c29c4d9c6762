"""From a JSON file to frozen dataclasses, with every problem as a sentence that says where it is.

The dataclasses say what a value must be (``mm.config.model``, ``mm.config.data``), pydantic checks it, and this module
turns what pydantic finds into words.
"""

import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from annotated_types import Ge, Gt, Lt
from pydantic import AllowInfNan, BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUseDefault

from mm.config.foreign import Fixed, Inert, Repeated, Row
from mm.config.read import Document, read_json
from mm.errors import UserError, nearest

Built = TypeVar("Built")

STRICT = ConfigDict(extra="forbid")
"""For every dataclass of settings: a name that it does not have is a mistake."""


@dataclass(frozen=True)
class Key:
    """Where the value of a field stands in its JSON file, if not under the field's name.

    ``path`` starts at the object that holds the keys of the dataclass.  For a field that is itself a dataclass it is
    what all keys of that one begin with: ``"text_decoder."``, ``"recompute_"``.
    """

    path: str
    alias: str = ""
    """Another name that is accepted for the same value."""


@dataclass(frozen=True)
class Expected:
    """What to call a value of this type, where the type itself does not say enough."""

    words: str


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _default_if_null(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


Int = Annotated[int, BeforeValidator(_whole)]
"""A whole number; 2.0 is one, true is not."""
Count = Annotated[Int, Ge(1)]
Number = Annotated[float, AllowInfNan(False)]
NotNegative = Annotated[Number, Ge(0)]
OrDefault = BeforeValidator(_default_if_null)
"""Null means the default."""


@dataclass(frozen=True)
class Read(Generic[Built]):
    """What was read without a problem."""

    value: Built
    notes: tuple[str, ...] = ()
    """What has no effect, and why."""
    repeated: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """For each key that repeats a flag: ``file:line: key is value``, and the values of the flag that agree with it."""


def read_settings(
    path: str | Path, cls: type[Built], tables: Mapping[str, Mapping[str, Row]],
    rules: Callable[[Built], Iterator[str]],
) -> Read[Built]:
    """Read a JSON file as the dataclass ``cls``; raises UserError with every problem in the file.

    ``tables`` has every object of the file, with its keys that are no fields of ``cls``.  ``rules`` yields what is
    wrong between fields; it is called only when every single value is right.
    """
    found = _Findings(read_json(path))
    places = list(_places(cls))
    found.check_objects(tables, [key_path for _, key_paths, _ in places for key_path in key_paths])
    values: dict[str, Any] = {}
    for names, key_paths, _ in places:
        inner = values
        for name in names[:-1]:
            inner = inner.setdefault(name, {})
        given = [key_path for key_path in key_paths if found.document.get(key_path, _ABSENT) is not _ABSENT]
        if given:
            inner[names[-1]] = found.document.get(given[0])
        if len(given) > 1 and found.document.get(given[0]) != found.document.get(given[1]):
            found.add(given[1], f"is another value than {given[0]}; the two are names of one setting, so keep one")
    try:
        built = TypeAdapter(cls).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        found.add_invalid(error, places)
        raise found.error() from error
    if found.problems:
        raise found.error()
    if broken := list(rules(built)):
        raise UserError(f"{path}: {problem}" for problem in broken)
    notes = (f"{path}: {why}; no effect: {', '.join(keys)}" for why, keys in found.inert.items())
    return Read(built, tuple(notes), tuple(found.repeated))


def fields_of(cls: type) -> Mapping[str, FieldInfo]:
    """The fields of a pydantic dataclass by name."""
    return typing.cast(Any, cls).__pydantic_fields__


_ABSENT = object()
_Place = tuple[tuple[str, ...], tuple[str, ...], FieldInfo]
"""The names that lead to a field, the paths of its key in the file, and the field."""


def _places(cls: type, names: tuple[str, ...] = (), start: str = "") -> Iterator[_Place]:
    """Where the file has the value of each field of ``cls``, and of the dataclasses in it."""
    for name, field in fields_of(cls).items():
        key = next((one for one in field.metadata if isinstance(one, Key)), Key(name))
        if isinstance(field.annotation, type) and is_dataclass(field.annotation):
            yield from _places(field.annotation, (*names, name), start + key.path)
        else:
            yield (*names, name), tuple(start + path for path in (key.path, key.alias) if path), field


class _Findings:
    """What is wrong in one file, and what has no effect there."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[tuple[float, str]] = []
        """Each with its line, by which they are sorted; a missing key comes last."""
        self.inert: dict[str, list[str]] = {}
        """Reason -> key paths."""
        self.repeated: list[tuple[str, tuple[Any, ...]]] = []

    def add(self, key_path: str, what: str) -> None:
        self.problems.append((self.document.line(key_path), f"{self.document.at(key_path)} {what}"))

    def error(self) -> UserError:
        return UserError(problem for _, problem in sorted(self.problems, key=lambda one: one[0]))

    def _is_there(self, key_path: str) -> bool:
        """Whether the object that has the key, or should have it, is there."""
        return not key_path or isinstance(self.document.get(key_path.rpartition(".")[0]), dict)

    def check_objects(self, tables: Mapping[str, Mapping[str, Row]], own: Sequence[str]) -> None:
        """Check that the objects are there, and every key in them that is no field of ours.

        An object without any field of ours may be null or missing.
        """
        for start, rows in tables.items():
            prefix = f"{start}." if start else ""
            found = self.document.get(start, _ABSENT)
            is_needed = any(key_path.startswith(prefix) for key_path in own)
            if isinstance(found, dict):
                inside = {path.removeprefix(prefix).partition(".")[0] for path in (*own, *tables)
                          if path.startswith(prefix)}
                for key, value in found.items():
                    if key in rows:
                        self._check_foreign(prefix + key, value, rows[key])
                    elif key not in inside:
                        self.add(prefix + key, f"is not a known key{nearest(key, (*inside, *rows))}")
            elif (is_needed or found not in (None, _ABSENT)) and self._is_there(start):
                what = "is missing" if found is _ABSENT else f"is {shown(found)}"
                self.add(start, f"{what}; expected an object {{...}}{'' if is_needed else ' or null'}")

    def _check_foreign(self, key_path: str, value: Any, row: Row) -> None:
        match row:
            case Inert(why):
                self.inert.setdefault(why, []).append(key_path)
            case Fixed(supported, why):
                if not any(_same(value, one) for one in supported):
                    self.add(key_path, f"is {shown(value)}; supported: {_any_of(supported)} ({why})")
            case Repeated(meanings):
                fitting = [fits for one, fits in meanings if _same(value, one)]
                if fitting:
                    self.repeated.append((f"{self.document.at(key_path)} is {shown(value)}", fitting[0]))
                else:
                    self.add(key_path, f"is {shown(value)}; supported: {_any_of([one for one, _ in meanings])}")

    def add_invalid(self, error: ValidationError, places: Sequence[_Place]) -> None:
        """Say what pydantic found, in one sentence for each key.

        Where a whole object is missing, nothing is said of its keys.
        """
        fields = {names: (key_paths, field) for names, key_paths, field in places}
        seen: set[tuple[str, ...]] = set()
        for one in error.errors():
            names = tuple(part for part in one["loc"] if isinstance(part, str))
            if one["type"] == "default_factory_not_called" or names in seen:
                continue
            seen.add(names)
            if names not in fields:  # deeper nesting than pydantic reads
                self.problems.append((0, f"{self.document.path}: {one['msg']}"))
                continue
            key_paths, field = fields[names]
            given = [key_path for key_path in key_paths if self.document.get(key_path, _ABSENT) is not _ABSENT]
            if given:
                value, words = self.document.get(given[0]), choices(field)
                legal = f"supported: {_any_of(words)}{nearest(str(value), words)}" if words else (
                    f"expected {expected(field)}")
                self.add(given[0], f"is {shown(value)}; {legal}")
            elif self._is_there(key_paths[0]):
                self.add(key_paths[0], f"is missing; expected {expected(field)}")


def expected(field: FieldInfo) -> str:
    """What a value of the field must be, in words: ``an integer of at least 1 or null``."""
    return _in_words(field.annotation, field.metadata)


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The words that the field takes, if it is one of a few."""
    parts = (field.annotation, *typing.get_args(field.annotation))
    return next((typing.get_args(one) for one in parts if typing.get_origin(one) is typing.Literal), ())


def _in_words(kind: Any, metadata: Sequence[Any]) -> str:
    given = next((one.words for one in metadata if isinstance(one, Expected)), "")
    if given:
        return given
    if typing.get_origin(kind) is Annotated:
        return _in_words(kind.__origin__, kind.__metadata__)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_in_words(one, ()) for one in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(typing.get_args(kind))}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string", types.NoneType: "null"}
    bounds = {Ge: " of at least {0.ge}", Gt: " above {0.gt}", Lt: " and less than {0.lt}"}
    limits = "".join(bounds[type(one)].format(one) for one in metadata if type(one) in bounds)
    return words[kind] + limits + (" or null" if OrDefault in metadata else "")


def _any_of(values: Sequence[Any]) -> str:
    *others, last = map(shown, values)
    return f"{', '.join(others)} or {last}" if others else last


def shown(value: Any) -> str:
    """A value as JSON writes it, cut to fit a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _same(value: Any, other: Any) -> bool:
    """Equality that keeps true apart from 1, but not 0 from 0.0."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
