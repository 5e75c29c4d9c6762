"""The warm process of ``tests.launch``: imports common modules once, and runs modules and scripts in forks of itself.

Importing torch, megatron and transformers takes longer than most tests.  So each test process keeps one such process,
``python -m tests.forked SOCKET``, which forks for each request (``tests.ask``): one program, or a module on several
ranks, as torchrun runs it.  tests/test_train.py shows that torchrun itself starts a run.
"""

import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

from PIL import Image

from mm.device.device import Device
from mm.process import free_port
from tests.launch import fork_rank

_NEEDED = ("mm.train", "mm.run.preflight", "mm.run.loop", "mm.evaluate", "mm.generation.answers",
           "mm.generation.setup", "checkpoint.cli", "tests.tiny",
           "megatron.core.transformer.transformer_block", "transformers.models.qwen2.tokenization_qwen2")
"""Modules that most programs here import, directly or later."""


def warm() -> None:
    """Import the modules, and exempt their objects from garbage collection, which would scan them in every fork."""
    gc.disable()
    Device.pick("cpu")  # before megatron is imported
    for name in _NEEDED:
        importlib.import_module(name)
    Image.init()  # imports a module for each format
    gc.collect()
    gc.freeze()
    gc.enable()


def launch(num_ranks: int, module: str, arguments: list[str]) -> int:
    """Run the module on ``num_ranks`` ranks.  If one fails, end the others; returns the status of the first to fail."""
    importlib.import_module(module)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # this process has the store, as torchrun's agent has
    port = free_port()
    children: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        """End this process and its ranks."""
        for child in children:
            os.kill(child, signal.SIGKILL)
        os._exit(128 + number)

    children += [fork_rank(rank, num_ranks, port, lambda: _run(module, arguments, False)) for rank in range(num_ranks)]
    signal.signal(signal.SIGTERM, end)

    from torch.distributed import TCPStore  # after the forks: it starts a thread, which a fork would lack

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


def _run(program: str, arguments: list[str], is_script: bool) -> int:
    """Run the script or module as the main program; returns its status."""
    sys.argv = [program, *arguments]
    try:
        if is_script:
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def serve(listener: socket.socket) -> None:
    """Fork a process for each request (``tests.ask``), as long as the standard input is open."""
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            _answer(connection)
        connection.close()


def _reap(*_: object) -> None:
    """Wait for the processes that have ended, so that their CPU time counts as this process's."""
    with suppress(ChildProcessError):  # none is left
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _answer(connection: socket.socket) -> None:
    """In a fork that leads a new process group: run the request in another fork, and send back its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    asked, files, _, _ = socket.recv_fds(connection, 2**20, 3)
    connection.send(str(os.getpid()).encode())
    child = os.fork()
    if not child:
        connection.close()
        _become(json.loads(asked), files)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the child receives it too
    ready, _, _ = select.select([os.pidfd_open(child), connection], [], [])
    if connection in ready:  # the process that asked has ended
        os.killpg(0, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with suppress(BrokenPipeError):  # the process that asked has ended
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(asked: dict, files: list[int]) -> None:
    status = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        # opened anew, as in a new process: the old objects remember whether the old files could seek
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        os.environ.clear()
        os.environ |= asked["environment"]
        os.chdir(asked["directory"])
        sys.executable = asked.get("python", sys.executable)
        if asked["num_ranks"]:
            status = launch(asked["num_ranks"], asked["program"], asked["arguments"])
        else:
            status = _run(asked["program"], asked["arguments"], asked["is_script"])
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(ValueError):  # the program has closed them
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 255)


if __name__ == "__main__":
    warm()
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        serve(listener)
        shutil.rmtree(Path(listener.getsockname()).parent)
