"""The version of this project, for ``--version`` of every command, manifests and setup.py."""

import platform
from importlib.metadata import PackageNotFoundError, version

VERSION = "0.1.0"
_DECISIVE = ("torch", "megatron-core", "transformers")
"""Packages whose versions belong in a bug report."""


def version_line(program: str) -> str:
    """What ``--version`` prints; nothing is imported for it."""
    found = ", ".join(f"{package} {_installed(package)}" for package in _DECISIVE)
    return f"{program} {VERSION} (Python {platform.python_version()}, {found})"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
