"""One line of ``mm-doctor``."""

import json
from dataclasses import asdict, dataclass
from enum import Enum

from mm.errors import printable
from mm.files import json_object, whole_lines


class Level(str, Enum):
    """How bad it is."""

    __str__ = str.__str__

    OK = "ok"
    WARNING = "warning"
    """A run may work, but slowly, or not everywhere."""
    FAULT = "fault"
    """Runs fail here."""


@dataclass(frozen=True)
class Diagnosis:
    """What was looked at, what was found, and what to do about it."""

    level: Level
    name: str
    what: str
    cure: str = ""

    def text(self) -> str:
        """One line, and a second one with the cure."""
        cure = f"\n{'':9}cure: {self.cure}" if self.cure else ""
        return printable(f"{self.level:8} {self.name}: {self.what}{cure}")

    def line(self) -> str:
        """For ``read_lines``."""
        return json.dumps(asdict(self)) + "\n"


def read_lines(content: bytes) -> list[Diagnosis]:
    """Findings in the order in which a process wrote them, without one that it was writing when it ended."""
    return [Diagnosis(**one | {"level": Level(one["level"])}) for one in map(json_object, whole_lines(content))]


def ok(name: str, what: str) -> Diagnosis:
    return Diagnosis(Level.OK, name, what)


def warning(name: str, what: str, cure: str) -> Diagnosis:
    return Diagnosis(Level.WARNING, name, what, cure)


def fault(name: str, what: str, cure: str) -> Diagnosis:
    return Diagnosis(Level.FAULT, name, what, cure)
