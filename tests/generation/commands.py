"""Runs ``mm.generate`` or ``mm.evaluate`` one command after another, in forks of the warm process."""

import subprocess
from typing import Any

from tests.files import ROOT
from tests.launch import warm_python


def run_commands(commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The result of each command, given the arguments of ``_run``: its ``status``, ``out`` and ``err``."""
    return [_run(**command) for command in commands]


def _run(
    argv: list[str], program: str = "mm.generate", typed: str = "", kill_after: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """``typed`` is the standard input.  The program is killed when ``kill_after`` answers are on disk."""
    modules = [program] if kill_after is None else ["tests.generation.killed_worker", program, str(kill_after)]
    process = subprocess.Popen([str(warm_python()), "-m", *modules, *argv], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    try:
        out, err = process.communicate(typed, timeout=600)  # to the end of the pipes, which the fork has too
    finally:
        process.kill()
    return {"status": process.returncode, "out": out, "err": err}
