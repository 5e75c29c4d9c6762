"""Runs a module on several ranks, as torchrun does, but forked from one process that has imported what all need.

    python -m tests.forked NUM_RANKS MODULE ARGUMENTS

Importing torch, megatron and transformers takes longer than most tests.  So ``tests.launch`` keeps one process for all
tests of a process, ``python -m tests.forked serve SOCKET``, which forks a launcher for each request.  That torchrun
itself starts a run is shown by tests/test_train.py.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from datetime import timedelta
from types import FrameType

from mm.device.device import Device
from tests.launch import ANSWER, fork_rank, free_port

_NEEDED = ("mm.train", "mm.training.preflight", "mm.training.run", "mm.evaluate", "mm.generation.batches",
           "mm.generation.source", "mm.generation.terminal", "checkpoint.convert", "tests.tiny")
"""What most modules that are run here import, and all that it imports."""


def warm() -> None:
    """Import it.  The collector of garbage need not look at all this again in every fork."""
    Device.pick("cpu")  # before megatron is imported
    for name in _NEEDED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def main(num_ranks: int, module: str, arguments: list[str]) -> int:
    """Ends with the status of the first rank that fails, after the others were ended."""
    importlib.import_module(module)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # this process has the store, as torchrun's agent has
    port = free_port()
    children: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        """With this process its ranks end too."""
        for child in children:
            os.kill(child, signal.SIGKILL)
        os._exit(128 + number)

    children += [fork_rank(rank, num_ranks, port, lambda: _run(module, arguments)) for rank in range(num_ranks)]
    signal.signal(signal.SIGTERM, end)

    from torch.distributed import TCPStore  # only now: it starts a thread, which a fork would lose

    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=timedelta(days=1))
    status = 0
    while children:
        child, found = os.wait()
        children.remove(child)
        if found and not status:
            status = os.waitstatus_to_exitcode(found)
            sys.stderr.write(f"the first rank to fail ended with {status}\n")
            for other in children:
                os.kill(other, signal.SIGKILL)
    del store
    return abs(status)


def _run(module: str, arguments: list[str]) -> int:
    """The module, as if Python had been started with it; returns its status."""
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def serve(requests: socket.socket) -> None:
    """Fork a process for each request, until nobody is left who could make one.

    With a request come the files for its standard output and errors, and a pipe, to which this writes the number of the
    process, and the process its status.
    """
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        request, (*files,), _, _ = socket.recv_fds(requests, 2**20, 3)
        if not request:
            return
        child = os.fork()
        if not child:
            _answer(json.loads(request), requests, *files)
        os.write(files[2], struct.pack(ANSWER, child))
        for file in files:
            os.close(file)


def _reap(*_: object) -> None:
    """Take notice of the processes that have ended: their time counts as this process's then."""
    with suppress(ChildProcessError):  # none is left
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _answer(request: dict, requests: socket.socket, output: int, errors: int, answer: int) -> None:
    """In the fork, of which ``main`` forks the ranks; without ranks it runs the module itself."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests.close()
        for number, file in ((1, output), (2, errors)):
            os.dup2(file, number)
            os.close(file)
        os.set_inheritable(answer, False)
        os.environ.clear()
        os.environ |= request["environment"]
        num_ranks, module, arguments = request["num_ranks"], request["module"], request["arguments"]
        status = main(num_ranks, module, arguments) if num_ranks else _run(module, arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(answer, struct.pack(ANSWER, status))
        os._exit(0)


if __name__ == "__main__":
    warm()
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
