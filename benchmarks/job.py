"""One launch of a training as a user makes it, with all its processes: for benchmarks that disturb it."""

import os
import random
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.files import ROOT

MARK = "MM_JOB"
"""Environment variable whose value all processes of a launch inherit."""


class Job:
    """One launch."""

    def __init__(
        self, words: Sequence[str], num_ranks: int, output: Path, module: str = "mm.train",
        python: str = sys.executable, launcher_words: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """``words``: the flags of ``module``, which ``python`` runs; ``output``: a file, to which all of them write;
        ``environment``: more variables."""
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        environment = os.environ | dict(environment or {}) | {
            MARK: self.mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "PET_SHUTDOWN_TIMEOUT": "60",
        }  # fmt: skip
        words = [python, "-m", "mm.launch", "--nproc_per_node", str(num_ranks), "--master_addr", "localhost",
                 "--master_port", str(_port()), *launcher_words, "-m", module, *words]  # fmt: skip
        with output.open("a") as file:
            self.launcher = psutil.Popen(words, cwd=ROOT, env=environment, stdout=file, stderr=file)

    def processes(self) -> list[psutil.Process]:
        """All processes of this launch, also those whose parents have ended."""
        return marked_processes(self.mark)

    def ranks(self) -> list[psutil.Process]:
        return [one for one in self.processes() if "-m mm.train" in " ".join(one.cmdline()) and one != self.launcher
                and "mm.launch" not in " ".join(one.cmdline())]

    def workers(self) -> list[psutil.Process]:
        return [one for one in self.processes() if "multiprocessing" in " ".join(one.cmdline())]

    def wait(self) -> int:
        return self.launcher.wait(300)


def _port() -> int:
    """A free TCP port below those that the system gives to connections, one of which could take it at any moment."""
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("localhost", port))
            return port


def marked_processes(mark: str) -> list[psutil.Process]:
    """Living processes that have inherited this value of ``MARK``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
