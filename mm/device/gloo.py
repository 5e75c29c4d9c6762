"""Groups of torch's gloo backend with one worker thread each, instead of two.

After each collective, the worker writes the collective's name into a string that both workers of a group share, and
takes no lock (``ProcessGroupGloo::runLoop`` in ``ProcessGroupGloo.cpp``; seen with torch 2.13, not with 2.7.1).  Two
collectives with names of more than 15 characters that end at the same time corrupt the heap: megatron's gradient and
weight buckets on the CPU, which are coalesced, killed processes with "malloc(): unaligned tcache chunk detected".  One
worker runs the collectives of a group in the order in which they were started, as NCCL and HCCL do.
"""

import os
from datetime import timedelta

from torch.distributed import ProcessGroupGloo, Store  # pyright: ignore[reportPrivateImportUsage]

_make = ProcessGroupGloo.__init__


def with_one_worker(group: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Construct ``group`` as torch does, also on the interfaces in GLOO_SOCKET_IFNAME, but with one worker."""
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  (the stub has another name)
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces] or [
        ProcessGroupGloo.create_default_device()]
    options._timeout, options._threads = timeout, 1
    _make(group, store, rank, size, options)
