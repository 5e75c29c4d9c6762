"""Runs ``mm.generate`` or ``mm.evaluate`` several times in forks of one process that has imported what all need.

Started by ``run_commands``: ``tests.generation.commands COMMANDS.json``.  The file has a list of commands: ``argv``,
perhaps ``program`` (absent: mm.generate), perhaps ``input`` for the standard input, and perhaps ``kill_after``, a
number of lines in ``--output`` (or in ``answers``) after which the process is killed.  What comes of each goes to
``COMMANDS.found.json``.
"""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.launch import run_module, write_whole


def run_commands(directory: Path, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each: ``status``, ``out`` and ``err``."""
    asked = directory / "commands.json"
    asked.write_text(json.dumps(commands))
    done = run_module(0, "tests.generation.commands", str(asked), timeout_seconds=1800)
    assert done.status == 0, done.out + done.err
    return json.loads(asked.with_suffix(".found.json").read_text())


def _run(directory: Path, command: dict[str, Any]) -> dict[str, Any]:
    out, err, typed = (directory / name for name in ("out", "err", "in"))
    typed.write_text(command.get("input", ""))
    child = os.fork()
    if not child:
        _become(command.get("program", "mm.generate"), command["argv"], typed, out, err)
    output, most = None, command.get("kill_after")
    if most is not None:
        output = Path(command.get("answers") or command["argv"][command["argv"].index("--output") + 1])
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if output is not None and output.exists() and output.read_bytes().count(b"\n") >= most:
            os.kill(child, signal.SIGKILL)
            output = None
        time.sleep(0.002)
    return {"status": os.waitstatus_to_exitcode(status), "out": out.read_text(), "err": err.read_text()}


def _become(program: str, argv: list[str], typed: Path, out: Path, err: Path) -> None:
    """In the fork: the program, with files for its standard streams."""
    status = 1
    for number, path, mode in ((0, typed, os.O_RDONLY), (1, out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
                               (2, err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        os.dup2(os.open(path, mode, 0o600), number)
    try:
        status = importlib.import_module(program).main(argv)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        status = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(asked: Path) -> None:
    found = [_run(asked.parent, command) for command in json.loads(asked.read_text())]
    write_whole(asked.with_suffix(".found.json"), json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
