"""Process the items of a stream in worker processes, in order.

Processes are started through a fork server, a fresh process without threads.  Forking the trainer itself would copy
locks that its threads (communication, prefetch) may hold at that moment, open sockets, and the accelerator's state.
The cost: a script that trains needs an ``if __name__ == "__main__"`` guard.  The fork server and its processes end with
the process that has started it, also if they are stopped (``mm.data.fork_server``).
"""

import itertools
import os
import reprlib
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, popen_forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.queues import Queue
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from mm.process import STOPPING

Item = TypeVar("Item")
Result = TypeVar("Result")

_PRELOADED = ["mm.data.fork_server", "mm.data.feed.loader", "mm.data.feed.planner", "mm.data.order.sampler"]
"""One module for the fork server itself, and those that the worker processes need.  Named here, not imported: most of
them are on higher floors."""
_WORTH_A_START = 16
"""Number of items.  This process finishes fewer of them before worker processes would have started."""
_END_SECONDS = 5.0
"""How long to wait for the end of a worker after it was asked to end, or the connection to it has broken."""
_NUM_AHEAD = 4
"""Items that each process of ``in_processes`` works ahead."""


class Prepared(Iterator[Result], Generic[Result]):
    """The results of ``work`` for each item of a stream, in order, computed ahead by worker processes.

    ``work`` is sent to each process once.  An error raised in a worker is raised here with its traceback as text.
    """

    def __init__(
        self, work: Callable[[Item], Result], items: Iterable[Item], num_processes: int, num_ahead: int
    ) -> None:
        """Start the processes immediately; each works ``num_ahead`` items ahead.  With 0, this thread does the work."""
        each = _EachItem(work)
        self._results: Any = map(each.__getitem__, items) if num_processes == 0 else _in_loader(
            each, items, num_processes, num_ahead)

    def __next__(self) -> Result:
        return next(self._results)

    def close(self) -> None:
        """End the processes; no more items are processed."""
        if hasattr(self._results, "_shutdown_workers"):
            # torch has no public method for this.  It relies on the iterator being freed, but the traceback of an
            # error keeps a reference to it.  It would wait for each stopped worker in turn.
            late = threading.Timer(_END_SECONDS, lambda workers: [one.kill() for one in workers], [
                self._results._workers])
            late.daemon = True
            late.start()
            _continue_server()
            self._results._shutdown_workers()
            late.cancel()
        self._results = iter(())


def in_processes(work: Callable[[Item], Result], items: Iterable[Item], num_processes: int) -> Generator[Result]:
    """``work(item)`` for each item, in order.  With few items or one process, the work is done in this process.

    Closing the iterator ends the processes.
    """
    rest = iter(items)
    first = list(itertools.islice(rest, _WORTH_A_START))
    is_worth_it = num_processes > 1 and len(first) == _WORTH_A_START
    results = Prepared(work, itertools.chain(first, rest), num_processes if is_worth_it else 0, _NUM_AHEAD)
    try:
        yield from results
    finally:
        results.close()


def _in_loader(each: "_EachItem", items: Iterable[Any], num_processes: int, num_ahead: int) -> Iterator[Any]:
    loader = DataLoader(
        each,
        sampler=items,  # pyright: ignore[reportArgumentType]  (any iterable does)
        batch_size=None,
        num_workers=num_processes,  # torch limits each to one CPU thread
        collate_fn=_unchanged,
        prefetch_factor=num_ahead,
        multiprocessing_context=fork_server(),
        generator=torch.Generator(),  # otherwise torch draws a seed from the trainer's random state
    )
    with _uninterrupted():
        results: Any = iter(loader)
    results._worker_result_queue.workers = results._workers
    return results


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay signals that stop the program until the block, which starts processes, has finished: half-started processes
    could not be ended.

    The started processes block these signals for good.  A terminal or a scheduler sends them to every process; the
    parent decides what happens to the work.
    """
    received: list[tuple[int, FrameType | None]] = []
    is_main = threading.current_thread() is threading.main_thread()
    before: dict[int, Any] = {}
    for number in STOPPING if is_main else ():
        before[number] = signal.signal(number, lambda *arguments: received.append(arguments))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
    for number, frame in received[:1]:
        handler = before[number]
        if callable(handler):
            handler(number, frame)
        elif handler is signal.SIG_DFL:
            signal.raise_signal(number)


class _EachItem(torch.utils.data.Dataset[Any]):
    """``work`` as a dataset, for torch's loader."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def __getitem__(self, item: Any) -> Any:
        try:
            return self._work(item)
        except StopIteration as error:  # it would end the stream without an error
            name = getattr(self._work, "__qualname__", type(self._work).__qualname__)
            raise RuntimeError(f"{name} raised StopIteration for item {reprlib.repr(item)}") from error


def _unchanged(result: Any) -> Any:
    """Replaces torch's collate function, which turns tuples into lists and arrays into tensors."""
    return result


class _WorkerPopen(popen_forkserver.Popen):
    """Kills its process instead of terminating it.

    The process blocks SIGTERM, which torch and multiprocessing send to one that does not end by itself.
    """

    def terminate(self) -> None:
        self.kill()
        _continue_server()


class _ResultQueue(Queue):  # pyright: ignore[reportMissingTypeArgument]  (Python 3.11 accepts none)
    """Its ``get`` times out immediately if a worker has died.

    torch looks for dead workers after each timeout.  Otherwise it would look only every 5 seconds, because they are not
    children of this process.
    """

    _reader: Connection
    workers: Sequence[ForkServerProcess] = ()
    """Set in the process that reads the results."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        sentinels = [worker.sentinel for worker in self.workers]
        wait([self._reader, *sentinels], timeout if block else 0)
        try:
            return super().get(block, 0)
        except (OSError, EOFError):  # a tensor was fetched from a worker that has died or is about to
            wait(sentinels, _END_SECONDS)
            raise


class _WorkerProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> _WorkerPopen:  # multiprocessing's name
        return _WorkerPopen(process_obj)


class _WorkerContext(ForkServerContext):
    Process = _WorkerProcess

    def Queue(self, maxsize: int = 0) -> _ResultQueue:  # multiprocessing's name
        return _ResultQueue(maxsize, ctx=self)


def fork_server() -> ForkServerContext:
    """The running fork server; starts it on first use."""
    context = _WorkerContext()
    # Preloaded once in the fork server, so that processes start in milliseconds.  No effect once a server is running.
    context.set_forkserver_preload(_PRELOADED)
    resource_tracker.ensure_running()  # started here, because Python then unblocks SIGINT and SIGTERM
    with _uninterrupted():
        _start_server()
    return context


def _start_server() -> None:
    """Start the fork server, unless it runs, in a thread that never ends: the system kills the server with the thread
    that has started it."""
    before, started = _server(), Future[None]()

    def start() -> None:
        try:
            started.set_result(forkserver.ensure_running())
        except OSError as error:
            started.set_exception(error)
        if _server() != before:
            threading.Event().wait()

    threading.Thread(target=start, name="fork server", daemon=True).start()
    started.result()


def _server() -> int | None:
    """The process id of the fork server that this process has started."""
    return forkserver._forkserver._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]


def _continue_server() -> None:
    """Continue a fork server that is stopped: it alone reports that a worker has ended."""
    if (server := _server()) is not None:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGCONT)
