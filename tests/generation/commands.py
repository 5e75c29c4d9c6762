"""Runs ``mm.generate`` or ``mm.evaluate`` one command after another, in forks of the warm process."""

import subprocess
import time
from pathlib import Path
from typing import Any

from tests.files import ROOT
from tests.launch import warm_python


def run_commands(commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What came of each command, which has the arguments of ``_run``: its ``status``, ``out`` and ``err``."""
    return [_run(**command) for command in commands]


def _run(
    argv: list[str], program: str = "mm.generate", typed: str = "", kill_after: int | None = None,
    answers: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """``typed`` goes to the standard input.

    The program is killed as soon as its file of answers has ``kill_after`` lines: ``answers``, or else ``--output``.
    """
    process = subprocess.Popen([str(warm_python()), "-m", program, *argv], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    try:
        if kill_after is not None:
            output = Path(answers or argv[argv.index("--output") + 1])
            while process.poll() is None and not (output.exists() and output.read_bytes().count(b"\n") >= kill_after):
                time.sleep(0.002)
            process.kill()
        out, err = process.communicate(typed, timeout=600)  # to the end of the pipes, which the fork has too
    finally:
        process.kill()
    return {"status": process.returncode, "out": out, "err": err}
