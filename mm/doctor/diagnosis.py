"""One line of ``mm-doctor``."""

from dataclasses import dataclass
from enum import StrEnum

from mm.errors import printable


class Level(StrEnum):
    """How bad it is."""

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


def ok(name: str, what: str) -> Diagnosis:
    return Diagnosis(Level.OK, name, what)


def warning(name: str, what: str, cure: str) -> Diagnosis:
    return Diagnosis(Level.WARNING, name, what, cure)


def fault(name: str, what: str, cure: str) -> Diagnosis:
    return Diagnosis(Level.FAULT, name, what, cure)
