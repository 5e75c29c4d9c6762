"""Starts a worker module under torchrun on this machine's CPU, for tests that need real processes."""

import os
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


def write_whole(path: Path, text: str) -> None:
    """So that nobody reads half of it."""
    path.with_suffix(".part").write_text(text, encoding="utf-8")
    path.with_suffix(".part").replace(path)
