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
from tests.launch import fork_rank, free_port


def main(num_ranks: int, module: str, arguments: list[str]) -> int:
    """Ends with the status of the first rank that fails, after the others were ended."""
    Device.pick("cpu")
    importlib.import_module("mm.training.run")
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
    """In a rank: the module, as if Python had been started with it; returns its status."""
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
