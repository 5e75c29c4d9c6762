"""Runs the demo's stages as subprocesses, prints them with the time, and follows a training by the lines it prints.

Depends only on the script's variables and the format of the trainer's log line.
"""

import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from mm.process import free_port

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "examples/qwen2.5vl/finetune_qwen2_5_vl_tiny.sh"
ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)\s*\|")
_NUM_TAIL_LINES = 40
_NUM_REPORTS = 10  # progress lines per stage, without a terminal for a progress bar


class DemoError(RuntimeError):
    """A stage failed, or its result is not the expected one; the message names the stage and the result."""


class Clock:
    """Prints stages with the time since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._start

    def stage(self, what: str) -> None:
        minutes, seconds = divmod(int(self.seconds()), 60)
        print(f"[{minutes:02d}:{seconds:02d}] {what}", flush=True)


def run_script(variables: dict[str, str], flags: Sequence[str], log: Path, first: int, last: int) -> None:
    """Run the tiny script with ``variables`` from iteration ``first`` to ``last``, with its output in ``log``.

    Raises DemoError when it fails, or stops at another iteration than ``last``.
    """
    command = ["bash", SCRIPT, *flags]
    environment = script_environment() | variables
    seen, tail = 0, deque(maxlen=_NUM_TAIL_LINES)
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True, errors="replace") as process,
        tqdm(total=last - first + 1, unit="step", disable=None, leave=False) as bar,
    ):  # fmt: skip
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            file.write(line)
            tail.append(line)
            if match := ITERATION.search(line):
                seen = int(match[1])
                bar.update(seen - first + 1 - bar.n)
                _report(bar, line, seen - first + 1, last - first + 1)
    if process.returncode or seen != last:
        raise DemoError(
            f"{' '.join(command)} ended with status {process.returncode} after iteration {seen}; expected status 0 "
            f"after iteration {last}. The end of {log}:\n{''.join(tail)}"
        )


def plan_script(variables: dict[str, str], words: Sequence[str | Path], log: Path) -> str:
    """Run mm-plan with ``words`` on the tiny script's flags, with its output in ``log``; returns the output.

    Raises DemoError when it fails.
    """
    environment = script_environment() | variables | {"MM_PLAN": " ".join(map(str, words))}
    done = subprocess.run(["bash", SCRIPT], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)  # fmt: skip
    log.write_text(done.stdout, encoding="utf-8")
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-_NUM_TAIL_LINES:])
        raise DemoError(f"mm-plan {environment['MM_PLAN']} ended with status {done.returncode}. The end of {log}:\n"
                        f"{tail}")
    return done.stdout


def run_python(module: str, arguments: Sequence[str], log: Path) -> None:
    """Run ``python -m module`` with its output in ``log``.  Raises DemoError when it fails."""
    command = [sys.executable, "-m", module, *arguments]
    with log.open("w", encoding="utf-8") as file:
        status = subprocess.run(command, cwd=ROOT, env=script_environment(), stdin=subprocess.DEVNULL, stdout=file,
                                stderr=subprocess.STDOUT, check=False).returncode  # fmt: skip
    if status:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_NUM_TAIL_LINES:]
        raise DemoError(f"python -m {module} ended with status {status}. The end of {log}:\n" + "\n".join(tail))


def script_environment() -> dict[str, str]:
    """This process's environment, with this interpreter and a free port for the rendezvous."""
    return os.environ | {
        "PYTHON": sys.executable,
        "MASTER_PORT": str(free_port()),
        "HF_HUB_OFFLINE": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def _report(bar: tqdm, line: str, done: int, total: int) -> None:
    """Without a terminal, print about ``_NUM_REPORTS`` of the trainer's own lines."""
    if bar.disable and (done == total or done % max(1, total // _NUM_REPORTS) == 0):
        print("    " + line.strip(), flush=True)
