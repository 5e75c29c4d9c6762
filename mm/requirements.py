"""The packages that setup.py declares, and those that are installed.

Asks only for metadata: what is wrong with a package may be that it cannot be imported.
"""

import importlib.metadata

from packaging.requirements import Requirement

DISTRIBUTION = "qwen2_5_vl-3d"
"""The name of this project's package."""


def declared() -> list[Requirement]:
    """What every installation needs, without extras; empty if the project is not installed as a package."""
    found = (importlib.metadata.requires(DISTRIBUTION) or []) if installed(DISTRIBUTION) else []
    return [one for one in map(Requirement, found) if one.marker is None]


def installed(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_outside(requirement: Requirement, version: str) -> bool:
    """Whether ``version`` is not one that was tested."""
    return not requirement.specifier.contains(version, prereleases=True)
