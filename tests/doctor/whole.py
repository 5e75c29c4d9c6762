"""Runs ``mm-doctor`` as a user does, on an environment that shell commands have broken, and reads what it prints."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mm.doctor.diagnosis import Diagnosis, Level
from tests.files import ROOT

_LINE = re.compile(r"^(ok|warning|fault) +(.+?): (.*)(?:\n {9}cure: (.*))?$", re.MULTILINE)
_PROGRESS = re.compile(r"^trial of .*\n", re.MULTILINE)
"""Lines that a busy machine prints."""


@dataclass(frozen=True)
class Examined:
    """What one run printed, and its exit status."""

    status: int
    output: str

    @property
    def findings(self) -> list[Diagnosis]:
        return [Diagnosis(Level(level), *rest) for level, *rest in _LINE.findall(self.output)]

    @property
    def bad(self) -> dict[str, Diagnosis]:
        """Warnings and faults by name."""
        return {one.name: one for one in self.findings if one.level is not Level.OK}


def examined(
    *words: str, lines: Sequence[str] = (), python: str = sys.executable, inside: Sequence[str] = (),
    folder: Path = ROOT,
) -> Examined:
    """Run ``mm-doctor words`` in a shell, after ``lines``.

    ``inside``: a command that runs another one in namespaces of its own.
    """
    script = "\n".join(["set -e", *lines, f"exec {python} -m mm.doctor.cli --device cpu \"$@\""])
    done = subprocess.run(
        [*inside, "bash", "-c", script, "bash", *words], cwd=folder, text=True, capture_output=True, check=False,
        env=plain_environment() | {"PYTHONPATH": str(ROOT)})
    said = _PROGRESS.sub("", done.stderr)
    assert not said, said
    return Examined(done.returncode, done.stdout)


def plain_environment() -> dict[str, str]:
    """This process's, without variables that the doctor would report on some machines."""
    starts = "GLOO_", "NCCL_", "HCCL_", "CUDA_", "ASCEND_", "OMP_", "PYTHONOPTIMIZE", "TMPDIR"
    bin_folder = str(Path(sys.executable).parent)
    return {name: value for name, value in os.environ.items() if not name.startswith(starts)} | {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
