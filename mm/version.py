"""The version of this project, for ``--version`` of every command, manifests and setup.py."""

import platform
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VERSION = "0.1.0"
DECISIVE = ("torch", "megatron-core", "transformers")
"""Packages whose versions belong in a bug report."""
CODE = "the code in mm/"
"""Name of the code itself in ``software()``."""


def version_line(program: str) -> str:
    """What ``--version`` prints; nothing is imported for it."""
    found = ", ".join(f"{package} {_installed(package)}" for package in DECISIVE)
    return f"{program} {VERSION} (Python {platform.python_version()}, {found})"


def software() -> dict[str, str]:
    """What must be the same on all machines of a run: versions, and a checksum of the code itself, by name."""
    major, minor, _ = platform.python_version_tuple()
    return {"Python": f"{major}.{minor}", **{package: _installed(package) for package in DECISIVE},
            CODE: f"{VERSION}, crc32 {_code_crc32(Path(__file__).parent):08x}"}


def _code_crc32(folder: Path) -> int:
    crc32 = 0
    for path in sorted(folder.rglob("*.py")):
        crc32 = zlib.crc32(path.read_bytes(), zlib.crc32(str(path.relative_to(folder)).encode(), crc32))
    return crc32


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
