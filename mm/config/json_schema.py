"""From the objects of a JSON file to frozen dataclasses, by tables of keys; every problem is collected.

A table says of each key what it takes, which values are supported, or why it has no effect; any other key is a problem
that names its nearest neighbour.  Knows nothing of what the keys mean.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from mm.config.json_file import Document
from mm.errors import nearest

Built = TypeVar("Built")


@dataclass(frozen=True)
class Kind:
    """A type of value: what to call it, and a function that returns the value or raises TypeError."""

    expected: str
    read: Callable[[Any], Any]


def _rejecting(value: Any) -> NoReturn:
    raise TypeError(value)


def _int(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else _rejecting(value)


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else _rejecting(value)


def _ints(value: Any) -> tuple[int, ...]:
    return tuple(_int(item) for item in value) if isinstance(value, list) else _rejecting(value)


def _layout(value: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(value, list) and value and all(isinstance(item, list) for item in value):
        return tuple(_ints(item) for item in value)
    return (_ints(value),)


def _paths(value: Any) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not items or not all(isinstance(item, str) and item.strip() for item in items):
        return _rejecting(value)
    return tuple(item.strip() for item in items)


def at_least(minimum: int, kind: Kind) -> Kind:
    """``kind`` restricted to numbers that are at least ``minimum``."""

    def read(value: Any) -> Any:
        number = kind.read(value)
        return number if number >= minimum else _rejecting(value)

    return Kind(f"{kind.expected} of at least {minimum}", read)


def optional(kind: Kind) -> Kind:
    """``kind`` or null."""
    return Kind(f"{kind.expected} or null", lambda value: None if value is None else kind.read(value))


def _instance(kind: type) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, kind) else _rejecting(value)


ANY = Kind("anything", lambda value: value)
BOOL = Kind("true or false", _instance(bool))
TEXT = Kind("a string", _instance(str))
INT = Kind("an integer", _int)
FLOAT = Kind("a number", _float)
COUNT = at_least(1, INT)
OBJECT = Kind("an object {...}", _instance(dict))
INTS = Kind("a list of integers", _ints)
LAYOUT = Kind("a list of integers [pp], or a list of such lists [vpp][pp]", _layout)
PATHS = Kind("paths separated by commas, or a list of paths", _paths)


@dataclass(frozen=True)
class Takes:
    """A key with an effect.  ``field`` is the dataclass field that it fills, where that has another name."""

    kind: Kind
    field: str = ""


@dataclass(frozen=True)
class Fixed:
    """A key whose every value except ``supported`` is an error; ``why`` says so in a clause."""

    supported: tuple[Any, ...]
    why: str = "this is the only way the model is computed here"


@dataclass(frozen=True)
class Inert:
    """A key that is accepted and has no effect, for the reason ``why``."""

    why: str


Rule = Takes | Fixed | Inert


def shown(value: Any) -> str:
    """A value as JSON writes it, cut to fit a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass
class SchemaReader:
    """Checks the objects of one document against tables of rules; collects problems and inert keys."""

    document: Document
    problems: list[str] = field(default_factory=list)
    inert: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> key paths."""

    def values(self, key_path: str, table: Mapping[str, Rule]) -> dict[str, Any] | None:
        """The values at ``key_path``, by field name, for the keys that are present; None if it is no object."""
        found = self._lookup(key_path)
        if not isinstance(found, dict):
            if key_path and not isinstance(self._lookup(_parent(key_path)), dict):
                return None  # the parent's own problem says it
            what = "is missing" if found is None else f"is {shown(found)}"
            self.problems.append(f"{self.document.at(key_path)} {what}; expected {OBJECT.expected}")
            return None
        result: dict[str, Any] = {}
        for key, value in found.items():
            inner = f"{key_path}.{key}" if key_path else key
            rule = table.get(key)
            if rule is None:
                self.problems.append(f"{self.document.at(inner)} is not a known key{nearest(key, table)}")
            else:
                self._apply(rule, key, inner, value, result)
        return result

    def _lookup(self, key_path: str) -> Any:
        found = self.document.root
        for part in key_path.split(".") if key_path else ():
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def _apply(self, rule: Rule, key: str, key_path: str, value: Any, result: dict[str, Any]) -> None:
        match rule:
            case Inert(why):
                self.inert.setdefault(why, []).append(key_path)
            case Fixed(supported, why):
                if not any(_same(value, one) for one in supported):
                    legal = f"; supported: {' or '.join(shown(one) for one in supported)}" if supported else ""
                    self.problems.append(f"{self.document.at(key_path)} is {shown(value)}{legal} ({why})")
            case Takes(kind, name):
                try:
                    result[name or key] = kind.read(value)
                except TypeError:
                    self.problems.append(
                        f"{self.document.at(key_path)} is {shown(value)}; expected {kind.expected}"
                    )

    def build(
        self, cls: type[Built], key_path: str, values: Mapping[str, Any] | None, table: Mapping[str, Rule]
    ) -> Built | None:
        """Make the dataclass ``cls`` from ``values``; None if a key that it needs was missing or wrong.

        Fields without a default are required; ``values`` must hold no other names than the fields of ``cls``.
        """
        if values is None:
            return None
        complete = True
        for one in dataclasses.fields(cls):  # type: ignore[arg-type]
            is_required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
            if is_required and one.name not in values:
                complete = False
                for key, rule in table.items():
                    if isinstance(rule, Takes) and (rule.field or key) == one.name:
                        self.require(f"{key_path}.{key}" if key_path else key, rule.kind)
        return cls(**values) if complete else None

    def require(self, key_path: str, kind: Kind) -> None:
        """Report the key at ``key_path`` if its object is there without it."""
        parent, key = self._lookup(_parent(key_path)), key_path.rpartition(".")[2]
        if isinstance(parent, dict) and key not in parent:
            self.problems.append(f"{self.document.at(key_path)} is missing; expected {kind.expected}")

    def notes(self) -> list[str]:
        """One sentence for each reason why keys of this file have no effect."""
        return [f"{self.document.path}: {why}; no effect: {', '.join(keys)}" for why, keys in self.inert.items()]


def _parent(key_path: str) -> str:
    return key_path.rpartition(".")[0]


def _same(value: Any, other: Any) -> bool:
    """Equality that keeps true apart from 1, but not 0 from 0.0."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
