"""An environment without this package, and a copy of its source, for tests that install it."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.files import ROOT


def copied_source(folder: Path) -> Path:
    """A copy of what a build needs, because a build leaves files beside the source."""
    for name in ("mm", "checkpoint", "demo"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def bare_environment(folder: Path) -> Path:
    """A virtual environment with the packages of this one, pip's too, but not ours."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read
    return folder


def bare_variables() -> dict[str, str]:
    """This process's, without the path to the source."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
