"""Frozen dataclasses as the definition of settings: their types, what marks a field, and reading them from strict JSON.

A field is defined once: type, bounds, default and meaning as pydantic has them, the rest by markers in ``Annotated``.
"""

import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, NoReturn, TypeVar, cast

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AllowInfNan, BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from mm.config.mindspeed import Fixed, Inert, Row
from mm.errors import NoEffect, UserError, nearest, refuse
from mm.files import read_regular

Built = TypeVar("Built")

STRICT = ConfigDict(extra="forbid")
"""For every dataclass of settings: an unknown name is a mistake."""


@dataclass(frozen=True)
class Key:
    """The position of a field's value in the JSON file, if it is not under the field's name."""

    path: str
    """From the object with the keys of the dataclass.  For a field that is itself a dataclass, the prefix of all its
    keys: ``"text_decoder."``, ``"recompute_"``."""
    alias: str = ""
    """Another accepted name of the same setting."""
    old: str = ""
    """A name in earlier versions, which has no effect if the new one is given too."""


@dataclass(frozen=True)
class Group:
    """Begins a group of flags in the help: this field and those after it."""

    title: str


@dataclass(frozen=True)
class Positional:
    """The field's values are the words of the command line that belong to no flag."""

    name: str


@dataclass(frozen=True)
class Needs:
    """The field may be set only if another one is."""

    other: str


@dataclass(frozen=True)
class Excludes:
    """The field and another one may not both be set."""

    other: str


@dataclass(frozen=True)
class Idle:
    """The field has no effect unless another one is set, or set to ``value``."""

    other: str
    value: Any = None


FIRST = "stands first in the help"
APPENDS = "each time that the flag is given, its words are added"
LOCAL = "machines may differ in it"
"""Marks paths, whose contents are compared where they matter, and what a machine may choose for itself."""
OrDefault = "null means the default"
"""Marks a field that may be null."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]
"""A whole number; 2.0 is one, true is not."""
Count = Annotated[Int, Ge(1)]
Number = Annotated[float, AllowInfNan(False)]
NaturalNumber = Annotated[Int, Ge(0)]
Seed = Annotated[NaturalNumber, Lt(2**63), Field(title="an integer of at least 0 and below 2^63")]
"""torch's generators take 64 bits, and every rank adds its number."""
NotNegative = Annotated[Number, Ge(0)]
Fraction = Annotated[NotNegative, Lt(1)]
Positive = Annotated[Number, Gt(0)]
PathText = Annotated[str, LOCAL]
PathOrNone = Annotated[str | None, LOCAL]
Patterns = Annotated[tuple[str, ...], Strict(False), Field(title="one or more words")]
"""Words: on the command line, any number after the flag.  ``mm.weights.table.matches`` reads those of weight names."""
Numbers = Annotated[tuple[NaturalNumber, ...], Field(title="one or more integers of at least 0")]


@dataclass(frozen=True)
class Document:
    """A JSON file and its value."""

    path: str
    root: Any

    def at(self, key_path: str) -> str:
        """``file: key.path`` for messages."""
        return f"{self.path}: {key_path or 'the file'}"

    def get(self, key_path: str) -> Any:
        """The value at ``key_path``, or None."""
        found: Any = self.root
        for key in key_path.split(".") if key_path else ():
            found = cast(dict[str, Any], found).get(key) if isinstance(found, dict) else None
        return found

    def has(self, key_path: str) -> bool:
        """Whether the key is present, even with the value null."""
        outer, _, key = key_path.rpartition(".")
        return not key_path or (isinstance(found := self.get(outer), dict) and key in found)


def read_json(path: str | Path) -> Document:
    """Read a UTF-8 JSON file (a byte order mark is fine); raises UserError for anything that JSON does not allow."""
    try:
        return parse_json(path, read_regular(Path(path)))
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read ({why}); expected a JSON file: copy or download it again") from error


def parse_json(path: str | Path, data: bytes) -> Document:
    """Parse ``data``, the bytes of the file at ``path``, as ``read_json`` does."""
    try:
        text = data.decode("utf-8-sig")
        return Document(str(path), json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {not_utf8(error)}") from error
    except json.JSONDecodeError as error:
        line = error.doc.split("\n")[error.lineno - 1].strip()
        raise UserError(f"{path}:{error.lineno}:{error.colno}: {error.msg}, in {line[:80]!r}; JSON has double quotes, "
                        f"true, false and null, and neither comments nor a comma after the last value") from error
    except RecursionError as error:
        raise UserError(f"{path}: too many levels of nesting") from error
    except ValueError as error:  # of the two functions below, or a number of too many digits
        raise UserError(f"{path}: {error}") from error


def not_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with text in another encoding, and the cure."""
    return (f"byte {error.object[error.start]:#04x} is not UTF-8; save the file as UTF-8, for example with 'iconv -f "
            f"GBK -t UTF-8'")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"{twice} appears twice in one object; remove one of the two")
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON; expected a finite number or null")


@dataclass(frozen=True)
class ReadSettings(Generic[Built]):
    """The settings in a file without problems."""

    value: Built
    notes: tuple[str, ...]
    """Keys without effect, and why."""
    document: Document


def read_settings(
    path: str | Path, cls: type[Built], tables: Mapping[str, Mapping[str, Row]],
    rules: Callable[[Built], Iterator[str]],
) -> ReadSettings[Built]:
    """Read a JSON file as the dataclass ``cls``; raises UserError with every problem in the file.

    ``tables``: every object of the file, with its keys that are no fields of ``cls``.  ``rules``: problems between
    fields; called only if every single value is valid.
    """
    found = _FileFindings(read_json(path))
    values = found.read(cls)
    for key_path, rows in tables.items():
        found.check_object(key_path, rows, tables)
    refuse(found.problems)
    built = TypeAdapter(cls).validate_python(values)
    refuse(f"{path}: {problem}" for problem in rules(built))
    notes = (NoEffect(keys, why, path) for why, keys in found.inert.items())
    return ReadSettings(built, tuple(notes), found.document)


def fields_of(cls: type) -> Mapping[str, FieldInfo]:
    """The fields of a pydantic dataclass by name."""
    return typing.cast(Any, cls).__pydantic_fields__


def changed(settings: object) -> list[str]:
    """The fields of a pydantic dataclass whose values are not the defaults."""
    return [name for name, field in fields_of(type(settings)).items() if getattr(settings, name) != field.default]


def section_of(field: FieldInfo) -> type | None:
    """The dataclass that a field holds, or may hold."""
    kinds = (field.annotation, *typing.get_args(field.annotation))
    return next((one for one in kinds if isinstance(one, type) and is_dataclass(one)), None)


def settings_of(cls: type, name: str = "", start: str = "") -> Iterator[tuple[str, list[str], FieldInfo]]:
    """Yield each field that is no dataclass, with its dotted name and its key paths, primary first.

    ``name`` is put before all names, and ``start`` before all key paths.
    """
    for own, field in fields_of(cls).items():
        key = next((one for one in field.metadata if isinstance(one, Key)), Key(own))
        if (section := section_of(field)) is not None:
            yield from settings_of(section, f"{name}{own}.", start + key.path)
        else:
            yield name + own, [start + path for path in (key.path, key.alias, key.old) if path], field


class _FileFindings:
    """Problems in one file, and keys without effect."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[str] = []
        self.inert: dict[str, list[str]] = {}
        """Reason -> key paths."""
        self._field_paths: list[str] = []
        """The key paths of all fields."""

    def _add(self, key_path: str, what: str) -> None:
        self.problems.append(f"{self.document.at(key_path)} {what}")

    def read(self, cls: type) -> dict[str, Any]:
        """The values of ``cls``; a dict for each dataclass in it."""
        values: dict[str, Any] = {}
        for name, key_paths, field in settings_of(cls):
            inner, (*outer, own) = values, name.split(".")
            for dataclass_name in outer:
                inner = inner.setdefault(dataclass_name, {})
            self._field_paths += key_paths
            old = next((one.old for one in field.metadata if isinstance(one, Key)), "") or None
            given = [key_path for key_path in key_paths if self.document.has(key_path)]
            if given and not (OrDefault in field.metadata and self.document.get(given[0]) is None):
                inner[own] = self._value(given[0], field)
            elif not given and field.is_required() and self._has_object(key_paths[0]):
                self._add(key_paths[0], f"is missing; expected {expected(field)}")
            for other in given[1:]:
                if other == old:
                    self.inert.setdefault(f"{given[0]} is given too", []).append(other)
                elif self.document.get(other) != self.document.get(given[0]):
                    self._add(other, f"differs from {given[0]}; both are names of the same setting, so keep one")
        return values

    def _value(self, key_path: str, field: FieldInfo) -> Any:
        value = self.document.get(key_path)
        try:
            return converted(value, field, strict=True)
        except ValidationError:
            words = choices(field)
            legal = f"supported: {_any_of(words)}{nearest(str(value), words)}" if words else (
                f"expected {expected(field)}")
            self._add(key_path, f"is {shown(value)}; {legal}")

    def _has_object(self, key_path: str) -> bool:
        """Whether the object that has the key, or should have it, exists."""
        return not key_path or isinstance(self.document.get(key_path.rpartition(".")[0]), dict)

    def check_object(self, object_path: str, rows: Mapping[str, Row], objects: Iterable[str]) -> None:
        """Check that an object exists, unless it has no fields, and check its keys that are no fields."""
        prefix = f"{object_path}." if object_path else ""
        found = self.document.get(object_path)
        is_needed = any(key_path.startswith(prefix) for key_path in self._field_paths)
        if isinstance(found, dict):
            inside = {path.removeprefix(prefix).partition(".")[0] for path in (*self._field_paths, *objects)
                      if path.startswith(prefix)}
            for key, value in typing.cast(dict[str, Any], found).items():
                if key in rows:
                    self._check_foreign(prefix + key, value, rows[key])
                elif key not in inside:
                    self._add(prefix + key, f"is not a known key{nearest(key, (*inside, *rows))}")
        elif (is_needed or found is not None) and self._has_object(object_path):
            what = f"is {shown(found)}" if self.document.has(object_path) else "is missing"
            self._add(object_path, f"{what}; expected an object {{...}}{'' if is_needed else ' or null'}")

    def _check_foreign(self, key_path: str, value: Any, row: Row) -> None:
        match row:
            case Inert(why):
                self.inert.setdefault(why, []).append(key_path)
            case Fixed(supported, why):
                # true is not 1, but 0 is 0.0
                if not any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in supported):
                    self._add(key_path, f"is {shown(value)}; supported: {_any_of(supported)} ({why})")


def converted(value: Any, field: FieldInfo, *, strict: bool) -> Any:
    """The value as the field's type; unless ``strict``, text is converted.  Raises pydantic's ValidationError."""
    kind = typing.cast(Any, Annotated[(field.annotation, Key(""), *field.metadata)])
    return TypeAdapter(kind, config=ConfigDict(strict=strict)).validate_python(value)


def expected(field: FieldInfo) -> str:
    """Description of a valid value: the field's title, or its type in words: ``an integer of at least 1 or null``."""
    return field.title or _in_words(field.annotation, field.metadata)


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The words that the field accepts, if it accepts only certain words."""
    annotations = (field.annotation, *typing.get_args(field.annotation))
    return next((typing.get_args(one) for one in annotations if typing.get_origin(one) is typing.Literal), ())


def _in_words(kind: Any, metadata: Sequence[Any]) -> str:
    if typing.get_origin(kind) is Annotated:
        return _in_words(kind.__origin__, kind.__metadata__)
    inner = typing.get_args(kind)
    if types.NoneType in inner:
        return f"{_in_words(inner[0], ())} or null"
    if typing.get_origin(kind) is typing.Literal:
        return f"{'one of ' * (len(inner) > 1)}{', '.join(inner)}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string", Path: "a path"}
    bounds = {Ge: " of at least {0.ge}", Gt: " above {0.gt}", Lt: " and less than {0.lt}",
              Le: " and at most {0.le}"}
    # once each: some releases of pydantic repeat the metadata
    limits = "".join(dict.fromkeys(bounds[type(one)].format(one) for one in metadata if type(one) in bounds))
    return words[kind] + limits + (" or null" if OrDefault in metadata else "")


def _any_of(values: Sequence[Any]) -> str:
    *others, last = map(shown, values)
    return f"{', '.join(others)} or {last}" if others else last


def shown(value: Any) -> str:
    """A value as JSON, shortened to fit a message; values that JSON lacks, such as bytes, as Python writes them."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."
