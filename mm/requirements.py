"""The packages that setup.py declares, and those that are installed.

Reads only metadata, because a broken package may be impossible to import.
"""

import importlib.metadata
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "qwen2_5_vl-3d"
"""The name of this project's package."""


def declared() -> "list[Requirement]":
    """What every installation needs, without extras; empty if the project is not installed as a package."""
    from packaging.requirements import Requirement  # not at the top: mm-doctor reports that it is missing

    return [one for one in map(Requirement, _requires()) if one.marker is None]


def declared_names() -> list[str]:
    """The names alone, for a Python without ``packaging``."""
    return [re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in _requires() if ";" not in one]


def _requires() -> list[str]:
    return (importlib.metadata.requires(DISTRIBUTION) or []) if installed(DISTRIBUTION) else []


def installed(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_outside(requirement: "Requirement", version: str) -> bool:
    """Whether ``version`` is not one that was tested."""
    return not requirement.specifier.contains(version, prereleases=True)
