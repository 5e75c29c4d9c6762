"""Processes that a benchmark starts on this machine, as ranks of one run."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def run_ranks(num_ranks: int, module: str, arguments: Sequence[str], num_threads: int = 1) -> None:
    """Run ``-m module arguments`` on ``num_ranks`` ranks of ``num_threads`` threads each, under torchrun.

    Ends this process with their output where one of them fails.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_ranks), "--master_addr", "localhost",
        "--master_port", str(free_port()), "-m", module, *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
