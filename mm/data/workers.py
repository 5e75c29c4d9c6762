"""Process the items of a stream in worker processes, in order.

A decoder may crash, hang or fill the memory, and nothing in its own process can stop it.  Workers therefore decode
inside ``decoding``.  When a worker ends there, another one takes its place and gets the same item, in which that file
now raises a UserError: it costs one sample, and all other results and their order stay the same.

Processes are started through a fork server, a fresh process without threads: forking the trainer itself would copy
locks that its threads hold, open sockets, and the accelerator's state.  So a script that trains needs an ``if __name__
== "__main__"`` guard.  The server and its workers end with the process that they work for, even if they are stopped
(``mm.data.fork_server``).
"""

import ctypes
import gc
import itertools
import os
import reprlib
import resource
import signal
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.pool import ExceptionWithTraceback  # pyright: ignore[reportAttributeAccessIssue]
from multiprocessing.util import Finalize
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread, current_thread, main_thread
from typing import Any, Generic, Protocol, TypeVar

import torch

from mm.errors import UserError
from mm.process import STOPPING

Item = TypeVar("Item")
Result = TypeVar("Result")

DECODING_SECONDS = 300.0
"""Limit for one image."""
ROOM_BYTES = 4 << 30
"""Memory that decoding one file may reserve: three times what the largest image takes."""
_PRELOADED = ["mm.data.fork_server", "mm.data.loader.loader", "mm.data.sampler.sampler"]
"""Strings, because importing them would invert the layering."""
_WORTH_A_START = 16
"""Number of items.  This process finishes fewer of them before worker processes would have started."""
_NUM_AHEAD = 4
"""Items that each process of ``in_processes`` works ahead."""
_END_SECONDS = 5.0
"""How long to wait for the end of a worker whose connection has broken."""
_NAME_BYTES = 4096


class Embedded(Protocol):
    """A file within another one."""

    @property
    def content(self) -> bytes: ...


class _Watched:
    """What a worker is decoding, in memory shared with its parent, and the files whose decoding ended a worker."""

    def __init__(self, name: Any) -> None:
        self.name = name
        self.lost: dict[bytes, str] = {}


_WATCHED: ContextVar[_Watched | None] = ContextVar("_WATCHED", default=None)
"""None outside of workers."""


@contextmanager
def decoding(path: str | Embedded, seconds: float = DECODING_SECONDS) -> Iterator[None]:
    """Limits the time and memory of a block that decodes ``path``, if this process is a worker.

    Raises UserError when the block needs more than ``ROOM_BYTES``, or ended a worker before.
    """
    watched = _WATCHED.get()
    if watched is None:
        yield
        return
    name = path if isinstance(path, str) else f"{path} {zlib.crc32(path.content)}"
    key = name.encode(errors="surrogatepass")[: _NAME_BYTES - 1]
    if key in watched.lost:
        raise UserError(f"{path}: {watched.lost[key]}; re-encode or remove it.")
    before = resource.getrlimit(resource.RLIMIT_AS)
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    watched.name.value = key
    try:
        room = num_pages * resource.getpagesize() + ROOM_BYTES
        limits = [one for one in before if one != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([room, *limits]), before[1]))
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends the process, whatever it is doing
        yield
    except MemoryError:
        raise UserError(f"{path}: decoding needs more than {ROOM_BYTES >> 30} GiB of memory; re-encode or remove it."
                        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        watched.name.value = b""


class Prepared(Iterator[Result], Generic[Result]):
    """The results of ``work`` for each item of a stream, in order, computed ahead by worker processes.

    ``work`` is sent to each process once.  An error raised in a worker is raised here, caused by its traceback.
    """

    def __init__(
        self, work: Callable[[Item], Result], items: Iterable[Item], num_processes: int, num_ahead: int
    ) -> None:
        """Start the processes immediately; each works ``num_ahead`` items ahead.  With 0, this thread does the work."""
        self._workers = _Workers(work, num_processes) if num_processes else None
        rest = iter(items)
        self._results: Iterator[Result] = (_done(work, item) for item in rest) if self._workers is None else _in_order(
            self._workers, deque(map(self._workers.submit, itertools.islice(rest, num_processes * num_ahead))), rest)

    def __next__(self) -> Result:
        return next(self._results)

    def close(self) -> None:
        """End the processes; no more items are processed."""
        if self._workers is not None:
            self._workers.close()
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


def _in_order(workers: "_Workers", ahead: deque[Future[Any]], items: Iterator[Any]) -> Iterator[Any]:
    while ahead:
        result = ahead.popleft().result()
        ahead.extend(map(workers.submit, itertools.islice(items, 1)))
        yield result


class _Workers:
    """Processes that each do one item at a time, each with a thread that waits for its result or its end."""

    def __init__(self, work: Callable[[Any], Any], num_processes: int) -> None:
        self._work, self._context = work, fork_server()
        self._lost: dict[bytes, str] = {}
        self._tasks: SimpleQueue[tuple[Any, Future[Any]] | None] = SimpleQueue()
        self._lock, self._is_closed = Lock(), False
        self._workers = [_Worker(self._context, work) for _ in range(num_processes)]
        self._end = Finalize(self, _kill, (self._workers,), exitpriority=1)
        for number in range(num_processes):
            Thread(target=self._run, args=(number,), name="data worker", daemon=True).start()

    def submit(self, item: Any) -> Future[Any]:
        """The future result for ``item``."""
        future = Future[Any]()
        self._tasks.put((item, future))
        return future

    def close(self) -> None:
        """End the processes and their threads."""
        with self._lock:
            self._is_closed = True
        self._end()
        for _ in self._workers:
            self._tasks.put(None)

    def _run(self, number: int) -> None:
        while (task := self._tasks.get()) is not None:
            item, future = task
            try:
                future.set_result(self._result(number, item))
            except Exception as error:
                future.set_exception(error)

    def _result(self, number: int, item: Any) -> Any:
        """The result of worker ``number``, replaced as often as a file ends it."""
        while True:
            connection = self._workers[number].connection
            try:
                connection.send((item, self._lost))
                result = connection.recv()
            except (EOFError, OSError) as error:
                self._replace(number, error)
                continue
            if isinstance(result, Exception):
                raise result
            return result

    def _replace(self, number: int, error: Exception) -> None:
        """Start a worker in place of one that has ended, and note the file that it was decoding.

        ``error``: from the connection to it; raised again if it has not ended.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the data workers were closed")
            worker = self._workers[number]
            worker.process.join(_END_SECONDS)
            if worker.process.is_alive():
                raise error
            name, why = bytes(worker.name.value), _reason(worker.process.exitcode or 0)
            if not name:
                raise UserError(f"a data worker ended: its process {why}.  If no error is reported above, memory or "
                                f"/dev/shm is full (see dmesg): lower --num-workers, or prefetch_factor.")
            self._lost = self._lost | {name: f"its decoder {why}"}
            self._workers[number] = _Worker(self._context, self._work)


def _reason(status: int) -> str:
    """How a process ended, given its ``exitcode``."""
    if status == -signal.SIGALRM:
        return "took too long (videos: video_timeout of the data JSON)"
    if status == -signal.SIGKILL:
        return "was killed, perhaps because memory ran out"
    return f"crashed ({signal.Signals(-status).name})" if status < 0 else f"ended with status {status}"


class _Worker:
    """A process, the connection to it, and the name of the file that it is decoding."""

    def __init__(self, context: ForkServerContext, work: Callable[[Any], Any]) -> None:
        self.connection, other = context.Pipe()
        self.name: Any = context.RawArray(ctypes.c_char, _NAME_BYTES)
        self.process = context.Process(
            target=_serve, args=(work, other, self.name), name="data worker", daemon=True)
        self.process.start()
        other.close()


def _kill(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    if (server := _server()) is not None:
        os.kill(server, signal.SIGCONT)  # it alone reports that a worker has ended
    for worker in workers:
        worker.process.join()


def _serve(work: Callable[[Any], Any], connection: Connection, name: Any) -> None:
    """Main function of a worker: do each item that comes, until the connection closes."""
    gc.freeze()  # memory shared with the other workers would be copied when the garbage collector marks it
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    watched = _Watched(name)
    _WATCHED.set(watched)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            item, watched.lost = connection.recv()
            try:
                result = _done(work, item)
            except Exception as error:
                result = ExceptionWithTraceback(error, error.__traceback__)
            connection.send(result)


def _done(work: Callable[[Item], Result], item: Item) -> Result:
    """``work(item)``.  A StopIteration becomes a RuntimeError, because it would mean the end of the stream."""
    try:
        return work(item)
    except StopIteration as error:
        name = getattr(work, "__qualname__", type(work).__qualname__)
        raise RuntimeError(f"{name} raised StopIteration for item {reprlib.repr(item)}") from error


def fork_server() -> ForkServerContext:
    """The running fork server; starts it on first use.

    Its processes block the signals that stop a program: schedulers send them to every process, and the parent decides.
    """
    context = get_context("forkserver")
    # Preloaded once in the fork server, so that processes start in milliseconds.  No effect once a server is running.
    context.set_forkserver_preload(_PRELOADED)
    assert _server() or current_thread() is main_thread(), "the server ends with the thread that starts it"
    resource_tracker.ensure_running()  # started here, because Python then unblocks SIGINT and SIGTERM
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context


def _server() -> int | None:
    """The process id of the fork server, if it has been started."""
    return forkserver._forkserver._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]
