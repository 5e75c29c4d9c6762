"""The combinations of Python and packages that are tested, and the versions that pip is held to in each."""

import re
from dataclasses import dataclass
from enum import Enum

from packaging.requirements import Requirement

from mm.environment import declared
from tests.files import ROOT


class Others(Enum):
    """The versions of all other packages."""

    LOCKED = "locked"
    """Those of requirements.lock."""
    OLDEST = "oldest"
    """What every installation needs is at the lower end of its range."""
    NEWEST = "newest"
    """The newest in range that the index has on the day."""


@dataclass(frozen=True)
class Combination:
    """Exact versions of what changes most, and which versions of the rest."""

    name: str
    python: str
    torch: str
    megatron_core: str
    transformers: str
    others: Others

    def pins(self) -> list[str]:
        """A line of pip's constraints for each package whose version is given, the three of this table first."""
        own = {"torch": self.torch, "megatron-core": self.megatron_core, "transformers": self.transformers}
        rest = {Others.LOCKED: _locked, Others.OLDEST: _lower_ends, Others.NEWEST: dict}[self.others]()
        return [f"{name}=={version}" for name, version in (own | rest | own).items()]


COMBINATIONS = (
    Combination("locked", "3.11", "2.13.0", "0.16.1", "5.23.0", Others.LOCKED),
    Combination("oldest", "3.10", "2.7.1", "0.16.0", "5.20.1", Others.OLDEST),
    Combination("image-2.7", "3.11", "2.7.1", "0.16.1", "5.24.0", Others.NEWEST),
    Combination("image-2.10", "3.12", "2.10.0", "0.19.2", "5.24.0", Others.NEWEST),
    Combination("python-3.11", "3.11", "2.15.0", "0.16.1", "5.24.0", Others.NEWEST),
    Combination("core-0.17", "3.12", "2.12.1", "0.17.1", "5.21.1", Others.NEWEST),
    Combination("core-0.18", "3.12", "2.14.1", "0.18.2", "5.22.2", Others.NEWEST),
    Combination("newest", "3.13", "2.15.0", "0.19.2", "5.24.0", Others.NEWEST),
)
"""Every end of every range in setup.py is in one of them, and every minor version of megatron-core; the two images are
Ascend's of mid-2026."""


def _locked() -> dict[str, str]:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def _lower_ends() -> dict[str, str]:
    return {one.name: end for one in declared() if (end := lower_end(one)) is not None}


def lower_end(requirement: Requirement) -> str | None:
    """The version after ``>=``; None for a package of any version."""
    ends = [one.version for one in requirement.specifier if one.operator == ">="]
    return ends[0] if ends else None
