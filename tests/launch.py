"""Starts ranks on this machine's CPU, as forks of one process, for tests that need real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

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


def fork_rank(rank: int, num_ranks: int, port: int, main: Callable[[], int]) -> int:
    """Run ``main`` in a fork of this process, as a launcher starts a rank; returns the process id.

    The fork ends with what ``main`` returns as its status.  It has what this process has imported, and so costs little;
    this process must not have started threads.
    """
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
                       "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}  # fmt: skip
        status = main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def results_by_size(directory: Path, module: str) -> Callable[[int], dict[str, dict]]:
    """What ``module OUTPUT.json`` writes of all its cases, by name, on a number of ranks: one launch of each."""

    @cache
    def run(world_size: int) -> dict[str, dict]:
        output = directory / f"{world_size}.json"
        run_ranks(world_size, module, str(output))
        return json.loads(output.read_text())

    return run


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def write_whole(path: Path, text: str) -> None:
    """So that nobody reads half of it."""
    path.with_suffix(".part").write_text(text, encoding="utf-8")
    path.with_suffix(".part").replace(path)
