"""Starts ranks on this machine's CPU for tests that need real processes: in forks of one process, or by torchrun."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests import ask
from tests.files import ROOT

_ASK = ROOT / "tests" / "ask.py"


@cache
def _warm_process() -> tuple[Path, subprocess.Popen]:
    """The socket of the warm process (``tests.forked``) for ``tests.ask``, and that process: one for each test process.

    It ends with this process, because its standard input is then closed.
    """
    path = Path(tempfile.mkdtemp(prefix="warm")) / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(64)
        command = [sys.executable, "-W", "ignore", "-m", "tests.forked", str(listener.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[listener.fileno()], stdin=subprocess.PIPE)
    return path, process


@cache
def warm_python() -> Path:
    """A command that replaces Python: it runs modules and scripts in forks of the warm process."""
    socket_path, _ = _warm_process()
    command = socket_path.with_name("python")
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {_ASK} {socket_path} {command} "$@"\n')
    command.chmod(0o755)
    return command


def run_ranks(num_ranks: int, module: str, *arguments: str, timeout_seconds: float = 900) -> str:
    """Run ``-m module arguments`` on ``num_ranks`` ranks, or with 0 as a program without a launcher.

    Returns standard output; a failure shows standard error too.
    """
    request = {"num_ranks": num_ranks, "program": module, "is_script": False, "arguments": arguments,
               "environment": dict(os.environ), "directory": str(ROOT)}  # fmt: skip
    path, _ = _warm_process()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as empty:
        with ask.request(str(path), request, [empty.fileno(), out.fileno(), err.fileno()]) as answers:
            process = ask.answer(answers)
            answers.settimeout(timeout_seconds)
            try:
                status = ask.answer(answers)
            except TimeoutError:
                os.killpg(process, signal.SIGKILL)  # the ranks too
                raise
        out.seek(0)
        err.seek(0)
        output, errors = (file.read().decode(errors="replace") for file in (out, err))
    assert status == 0, f"{module} {' '.join(arguments)}\n{output}\n{errors}"
    return output


def torchrun(
    num_ranks: int, module: str, *arguments: str, timeout_seconds: float = 400
) -> subprocess.CompletedProcess[str]:
    """Run ``module`` by torchrun itself, like a user; slow."""
    # Port 0: torchrun chooses one.  A port that is free now could be taken before torchrun has started.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_ranks), "--local_addr",
               "localhost", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "-m", module,
               *arguments]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_seconds, check=False)


def fork_rank(rank: int, num_ranks: int, port: int, main: Callable[[], int]) -> int:
    """Run ``main`` as one rank, in a fork of this process; returns the process id.

    The fork exits with the status that ``main`` returns.  It starts quickly, because this process has already imported
    everything; this process must not have threads.
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
    """A function from a number of ranks to what ``module OUTPUT.json`` writes there, by case; each runs once."""

    @cache
    def run(world_size: int) -> dict[str, dict]:
        output = directory / f"{world_size}.json"
        run_ranks(world_size, module, str(output))
        return json.loads(output.read_text())

    return run
