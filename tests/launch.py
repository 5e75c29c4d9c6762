"""Starts ranks on this machine's CPU, under torchrun or as forks, for tests that need real processes."""

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    """A TCP port nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def torchrun(num_processes: int, module: str, *arguments: str, timeout_seconds: int = 300) -> str:
    """Run ``-m module arguments`` on ``num_processes`` ranks; returns the output, which a failure shows whole."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_processes),
        "--master_addr", "localhost", "--master_port", str(free_port()), "-m", module, *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


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


def write_whole(path: Path, text: str) -> None:
    """So that nobody reads half of it."""
    path.with_suffix(".part").write_text(text, encoding="utf-8")
    path.with_suffix(".part").replace(path)
