"""Work on the items of a stream in processes of their own, in order.

Processes are started through a fork server, a fresh process without threads: forking the trainer itself would copy
locks that its threads may hold at that moment, open sockets, and the state of the accelerator.
"""

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

Given = TypeVar("Given")
Made = TypeVar("Made")

PRELOADED = ["mm.data.loader"]
"""Imported once in the fork server, which serves the trainer's data workers too: processes start in milliseconds."""
_WORTH_A_START = 16
"""Items; with fewer, the work is done before the processes are up."""


def in_processes(work: Callable[[Given], Made], items: Iterable[Given], num_processes: int) -> Generator[Made]:
    """``work`` of each item, in order; in this process where there are few items, or with one process.

    ``work`` is sent to each process once, and what it makes should be no sequence.  Closing the iterator ends the
    processes.
    """
    coming = iter(items)
    first = list(itertools.islice(coming, _WORTH_A_START))
    items = itertools.chain(first, coming)
    if num_processes == 1 or len(first) < _WORTH_A_START:
        yield from map(work, items)
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    made: Any = iter(
        DataLoader(
            _Work(work),
            sampler=items,  # pyright: ignore[reportArgumentType]  (any iterable does)
            batch_size=None,
            num_workers=num_processes,  # torch keeps each to one CPU thread
            prefetch_factor=4,
            multiprocessing_context="forkserver",
            worker_init_fn=end_with_parent,
            generator=torch.Generator(),  # else torch draws a seed from the trainer's own random numbers
        )
    )
    try:
        yield from made
    finally:
        made._shutdown_workers()  # torch has no public name for it


class _Work(torch.utils.data.Dataset[Any], Generic[Given, Made]):
    """``work`` as torch's loader calls it."""

    def __init__(self, work: Callable[[Given], Made]) -> None:
        self._work = work

    def __getitem__(self, index: Any) -> Any:
        return self._work(index)


def end_with_parent(worker: int) -> None:
    """In a worker: exit when the process that started it dies, however it does.

    torch's own watch looks at the parent's process id, which is the fork server's here, and that lives on.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
