"""Runs a module on several ranks, as torchrun does, but forked from one process that has imported what all need.

    python -m tests.forked NUM_RANKS MODULE ARGUMENTS

Importing torch, megatron and transformers takes longer than most tests.  That torchrun itself starts a run is shown by
the tests of whole runs.
"""

import importlib
import os
import runpy
import signal
import sys
from datetime import timedelta
from types import FrameType

from mm.device.device import Device
from tests.launch import free_port


def main(num_ranks: int, module: str, arguments: list[str]) -> int:
    """Ends with the status of the first rank that fails, after the others were ended."""
    Device.pick("cpu")
    importlib.import_module("mm.training.run")
    importlib.import_module(module)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    children: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        """With this process its ranks end too."""
        for child in children:
            os.kill(child, signal.SIGKILL)
        os._exit(128 + number)

    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
            os.environ.update(address, **{name: str(value) for name, value in sizes.items()})
            _run(module, arguments)
        children.append(child)
    signal.signal(signal.SIGTERM, end)

    from torch.distributed import TCPStore  # only now: it starts a thread, which a fork would lose

    store = TCPStore("localhost", int(address["MASTER_PORT"]), is_master=True, wait_for_workers=False,
                     timeout=timedelta(days=1))
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


def _run(module: str, arguments: list[str]) -> None:
    """In a rank: the module, as if Python had been started with it."""
    status = 1
    try:
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:  # what Python does with it at the end of a process
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
