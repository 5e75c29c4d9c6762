"""What this process runs in: our version and code, installed packages, and the launcher's environment variables.

Reads only metadata of packages, because a broken package may be impossible to import.
"""

import gc
import importlib.metadata
import os
import platform
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

VERSION = "0.1.0"
"""setup.py reads it here."""
DISTRIBUTION = "qwen2_5_vl-3d"
"""The name of this project's package."""
DECISIVE = ("torch", "megatron-core", "transformers")
"""Packages whose versions belong in a bug report."""
CODE = "the code in mm/"
"""Name of the code itself in ``software()``."""


# Versions and packages


def installed(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_line(program: str) -> str:
    """What ``--version`` prints; nothing is imported for it."""
    found = ", ".join(f"{package} {installed(package) or 'not installed'}" for package in DECISIVE)
    return f"{program} {VERSION} (Python {platform.python_version()}, {found})"


def software() -> dict[str, str]:
    """What must be the same on all machines of a run: versions, and a checksum of the code itself, by name."""
    major, minor, _ = platform.python_version_tuple()
    return {"Python": f"{major}.{minor}", **{package: installed(package) or "not installed" for package in DECISIVE},
            CODE: f"{VERSION}, crc32 {_code_crc32(Path(__file__).parent):08x}"}


def _code_crc32(folder: Path) -> int:
    crc32 = 0
    for path in sorted(folder.rglob("*.py")):
        crc32 = zlib.crc32(path.read_bytes(), zlib.crc32(str(path.relative_to(folder)).encode(), crc32))
    return crc32


def declared() -> "list[Requirement]":
    """What every installation needs, without extras; empty if the project is not installed as a package."""
    from packaging.requirements import Requirement  # not at the top: mm-doctor reports that it is missing

    return [one for one in map(Requirement, _requires()) if one.marker is None]


def declared_names() -> list[str]:
    """Their names, for a Python without ``packaging``."""
    return [re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in _requires() if ";" not in one]


def _requires() -> list[str]:
    return (importlib.metadata.requires(DISTRIBUTION) or []) if installed(DISTRIBUTION) else []


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep the garbage collector from running in the body, which imports modules, and from scanning them later.

    It takes a third of the time that a command needs to start.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()


# The launcher's variables

_MOST_DIGITS = 9


@dataclass(frozen=True)
class Launched:
    """This process among the ranks of its launcher, by environment variables; one without a number counts as absent."""

    rank: int = 0
    num_ranks: int | None = None
    local_rank: int = 0
    """Number of this rank on its machine."""
    num_local_ranks: int | None = None
    """Ranks on this machine."""

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> "Launched":
        rank, num_ranks, local_rank, num_local_ranks = (
            _number(environment.get(name, "")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        return cls(rank or 0, num_ranks or None, local_rank or 0, num_local_ranks or None)


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def launcher_problems(environment: Mapping[str, str], meets: bool = False) -> Iterator[str]:
    """Variables that have no number, or one that contradicts another.

    ``meets``: also those that are wrong or missing for the ranks to find each other.
    """
    here = Launched.here(environment)
    last = None if here.num_ranks is None else here.num_ranks - 1
    lasts = [here.num_local_ranks - 1] if here.num_local_ranks else []
    lasts += [] if _number(environment.get("RANK", "")) is None else [here.rank]
    for name, what, first, largest in (
        ("WORLD_SIZE", "the number of ranks", 1, None),
        ("RANK", "this rank's number", 0, last),
        ("LOCAL_WORLD_SIZE", "the number of ranks on this machine", 1, here.num_ranks),
        ("LOCAL_RANK", "this rank's number on its machine", 0, min(lasts, default=None)),
        ("MASTER_PORT", "a port of rank 0's host", 0, 65535),
    ):
        text = environment.get(name)
        if (text is None and (not meets or name.startswith("LOCAL_"))) or (name == "MASTER_PORT" and not meets):
            continue
        number = _number(text or "")
        if number is None or number < first or (largest is not None and number > largest):
            yield _problem(name, text, what if largest is None else f"{what}, {first} to {largest}")
    if meets and not environment.get("MASTER_ADDR"):
        yield _problem("MASTER_ADDR", environment.get("MASTER_ADDR"), "rank 0's host")


def _problem(name: str, text: str | None, expected: str) -> str:
    found = "not set" if text is None else repr(text if len(text) <= 40 else f"{text[:40]}...")
    return f"The environment variable {name} is {found}; expected {expected}, which torchrun sets"


def world_problems(environment: Mapping[str, str], world_size: int | None, rehearsal: str | None) -> Iterator[str]:
    """Contradictions within the launcher's environment, or with ``--world-size``: ranks would wait for missing ones.

    ``rehearsal``: the flag that only checks, for messages; None if it is given, because then nothing is launched.
    """
    launched, num_ranks = environment.get("WORLD_SIZE"), Launched.here(environment).num_ranks
    given = [name for name in ("WORLD_SIZE", "RANK") if name in environment]
    if rehearsal is not None:
        if len(given) == 1 and (given[0] == "RANK" or launched != "1"):
            missing = "RANK" if given[0] == "WORLD_SIZE" else "WORLD_SIZE"
            yield (f"The environment variable {given[0]} is set, but {missing} is not; start the ranks with torchrun, "
                   f"which sets both, or unset {given[0]} to run on one rank")
        if not given and world_size not in (None, 1):
            yield (f"--world-size is {world_size}, but no launcher started these ranks (WORLD_SIZE is not set); start "
                   f"them with torchrun, or add {rehearsal}")
    yield from launcher_problems(environment)
    if num_ranks is not None and world_size not in (None, num_ranks):
        yield (f"--world-size is {world_size}, but the launcher's WORLD_SIZE is {launched}; remove the flag, or unset "
               f"the variable to check beforehand")


def named_in_script(flag: str, path: str | None, environment: Mapping[str, str]) -> str:
    """``flag``, after the variable of the scripts that gave it ``path``: their users set that, and see no flag."""
    return f"LOAD_PATH ({flag})" if path and environment.get("LOAD_PATH") == path else flag
