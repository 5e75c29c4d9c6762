"""Work on the items of a stream in processes of their own, in order.

Processes are started through a fork server, a fresh process without threads: forking the trainer itself would copy
locks that its threads (communication, prefetch) may hold at that moment, open sockets, and the state of the
accelerator.  The price is that a script which trains needs its ``if __name__ == "__main__"`` guard.
"""

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

Given = TypeVar("Given")
Made = TypeVar("Made")

_PRELOADED = ["mm.data.feed.loader", "mm.data.feed.planner", "mm.data.order.sampler"]
"""All that processes need.  Named and not imported, because they stand on higher floors."""
_WORTH_A_START = 16
"""Items; with fewer, the work is done before the processes are up."""
_NUM_AHEAD = 4
"""Items, for each process."""


class Prepared(Iterator[Made], Generic[Made]):
    """What ``work`` makes of each item of a stream, in order, prepared ahead by processes.

    ``work`` is sent to each process once.  An error that it raises there is raised here with its traceback as text.
    """

    def __init__(
        self, work: Callable[[Given], Made], items: Iterable[Given], num_processes: int, num_ahead: int
    ) -> None:
        """Processes begin at once, and each is ``num_ahead`` items ahead; with none the calling thread works."""
        self._made: Any = map(work, items) if num_processes == 0 else _in_loader(work, items, num_processes, num_ahead)

    def __next__(self) -> Made:
        return next(self._made)

    def close(self) -> None:
        """End the processes.  Nothing more is made."""
        if hasattr(self._made, "_shutdown_workers"):
            # torch has no public name for this: it counts on the iterator being released, but the traceback of an
            # error holds it.
            self._made._shutdown_workers()
        self._made = iter(())


def in_processes(work: Callable[[Given], Made], items: Iterable[Given], num_processes: int) -> Generator[Made]:
    """``work`` of each item, in order; in this process where there are few items, or with one process.

    Closing the iterator ends the processes.
    """
    coming = iter(items)
    first = list(itertools.islice(coming, _WORTH_A_START))
    is_worth_it = num_processes > 1 and len(first) == _WORTH_A_START
    made = Prepared(work, itertools.chain(first, coming), num_processes if is_worth_it else 0, _NUM_AHEAD)
    try:
        yield from made
    finally:
        made.close()


def _in_loader(work: Callable[[Any], Any], items: Iterable[Any], num_processes: int, num_ahead: int) -> Iterator[Any]:
    loader = DataLoader(
        _Work(work),
        sampler=items,  # pyright: ignore[reportArgumentType]  (any iterable does)
        batch_size=None,
        num_workers=num_processes,  # torch keeps each to one CPU thread
        collate_fn=_unchanged,
        prefetch_factor=num_ahead,
        multiprocessing_context=fork_server(),
        worker_init_fn=_begin,
        generator=torch.Generator(),  # else torch draws a seed from the trainer's own random numbers
    )
    with _uninterrupted():
        return iter(loader)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C has its effect after what is inside, which starts processes: half started they could not be ended.

    What is started has it blocked for good: a terminal sends it to every process, and the one that has started the
    others says what becomes of the work.
    """
    came: list[tuple[int, FrameType | None]] = []
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda *told: came.append(told)) if is_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_main:
            signal.signal(signal.SIGINT, before)
    for told in came[:1]:
        if callable(before):
            before(*told)


class _Work(torch.utils.data.Dataset[Any]):
    """``work`` as torch's loader calls it."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def __getitem__(self, index: Any) -> Any:
        return self._work(index)


def _unchanged(made: Any) -> Any:
    """In place of torch's rule, which makes lists of tuples and tensors of arrays."""
    return made


def fork_server() -> ForkServerContext:
    """Starts processes."""
    context = multiprocessing.get_context("forkserver")
    # Imported once in the fork server; processes then start in milliseconds.  No effect once a server runs.
    context.set_forkserver_preload(_PRELOADED)
    with _uninterrupted():
        forkserver.ensure_running()
    return context


def _begin(worker: int) -> None:
    end_with_parent()


def end_with_parent() -> None:
    """In a process of ``fork_server``: exit when the one that started it dies, however it does.

    torch's own watch looks at the parent's process id, which is the fork server's here, and that lives on.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
