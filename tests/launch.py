"""Starts a worker module on several ranks of this machine's CPU, for tests that need real processes."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    """A TCP port nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def run_ranks(num_ranks: int, module: str, *arguments: str, timeout_seconds: int = 300) -> str:
    """Run ``-m module arguments`` on ``num_ranks`` ranks; returns the output, which a failure shows whole."""
    command = [sys.executable, "-m", "tests.forked", str(num_ranks), module, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks too
        raise
    assert process.returncode == 0, f"{' '.join(command)}\n{output}\n{errors}"
    return output


def write_whole(path: Path, text: str) -> None:
    """So that nobody reads half of it."""
    path.with_suffix(".part").write_text(text, encoding="utf-8")
    path.with_suffix(".part").replace(path)
