"""Requests answered by a separate process with limits of time and memory.

Code that runs on untrusted content (decoders, chat templates) may hang, crash or fill the memory, and nothing in the
same process can interrupt it.  So it runs in a process of its own, which the system ends at a limit, and which starts
again for the next request.

Does not import torch, so that such a process starts quickly.
"""

import contextlib
import errno
import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from mmap import mmap
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from mm.errors import UserError
from mm.process import STOPPING, ignore_stopping

Request = Mapping[str, Any]
"""JSON values.  ``num_content_bytes``, if present, is the number of bytes that follow."""
_SETTINGS = {
    # Threads reserve address space, which the limit counts: 64 MiB each without the first of these.
    "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    # Keeps the memory of one image for the next: requesting it from the system takes longer than decoding a JPEG file.
    "MALLOC_TRIM_THRESHOLD_": str(1 << 26), "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
}  # fmt: skip
"""Environment variables of the process."""
_SAFE_PATH = "import sys; sys.path[:] = filter(None, sys.path)"
"""Removes the current folder, whose files could stand in for modules.  The option ``-P`` needs Python 3.11."""
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|KEY", re.IGNORECASE)
"""Environment variables with one of these in their names are not passed to the process."""
_KEPT_BYTES = 1 << 25
"""Shared memory above this size is not reused, but returned to the system before the next answer."""


class ProcessEndedError(Exception):
    """The process ended, or ran out of memory, before it had answered."""

    def __init__(self, how: str, is_late: bool = False, is_large: bool = False) -> None:
        super().__init__(how)
        self.how = how
        """Such as "by signal SIGSEGV"."""
        self.is_late, self.is_large = is_late, is_large
        """Which limit it exceeded: that of time, or that of memory."""


class LimitedProcess:
    """The process that runs ``serve`` of a module.  It starts with the first request and ends with this object.

    Pickles without its process.  Every use is inside ``with process:``, where a second thread waits for the first.
    """

    def __init__(self, module: str) -> None:
        """``module`` has a function ``serve`` without parameters, which calls this module's ``serve``."""
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._memory = -1
        self._end: Callable[[], Any] = lambda: None
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return LimitedProcess, (self._module,)

    def __enter__(self) -> "LimitedProcess":
        """Reserve the process for this thread."""
        self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    @property
    def pid(self) -> int | None:
        """Its process id; None while it does not run."""
        return None if self._process is None else self._process.pid

    def ask(self, request: Request, content: bytes = b"") -> dict[str, Any]:
        """Send a request, with ``content`` behind it, and return the first message of the answer.

        Raises UserError with the problems in the answer, ProcessEndedError, and RuntimeError with the traceback of any
        other error in the process.
        """
        if self._process is None:
            self._start()
        pipe: Any = self._process and self._process.stdin
        try:
            pipe.write(json.dumps({**request, "num_content_bytes": len(content)}).encode() + b"\n")
            pipe.write(content)
            pipe.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self.message()

    def message(self) -> dict[str, Any]:
        """The next message of the answer.  Raises as ``ask`` does."""
        pipe: Any = self._process and self._process.stdout
        line = pipe.readline()
        if not line.endswith(b"\n"):  # it ended in the middle of one, or before it
            raise self._ended()
        message = json.loads(line)
        if "problems" in message:
            raise UserError(message["problems"])
        if "memory" in message:
            self.close()
            raise ProcessEndedError(f"more than {message['memory'] >> 20} MiB of memory", is_large=True)
        if "failure" in message:
            self.close()
            raise RuntimeError(message["failure"])
        return message

    def read(self, num_bytes: int) -> bytes:
        """The bytes that follow a message.  Raises ProcessEndedError."""
        pipe: Any = self._process and self._process.stdout
        found = pipe.read(num_bytes)
        if len(found) < num_bytes:
            raise self._ended()
        return found

    def shared(self, shape: Sequence[int]) -> np.ndarray:
        """A copy of the array that the process wrote into the shared memory."""
        found = np.empty(shape, dtype=np.uint8)
        if os.preadv(self._memory, [found.reshape(-1).data], 0) < found.nbytes:
            raise self._ended()
        return found

    def close(self) -> None:
        """End the process, if there is one."""
        self._process = None
        self._end()

    def _start(self) -> None:
        search_path = os.pathsep.join(filter(None, sys.path))
        harmless = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
        environment = {**harmless, **_SETTINGS, "PYTHONPATH": search_path}
        self._memory = os.memfd_create("mm-limited")
        ends, own = os.pipe()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # inherited: a new process does not ignore them yet
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-c", f"{_SAFE_PATH}; from mm.process import end_with; end_with({ends}); "
                                       f"from {self._module} import serve; serve({self._memory})"),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, pass_fds=(self._memory, ends))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(ends)
        self._end = weakref.finalize(self, _end, self._process, self._memory, own)  # does nothing when called again

    def _ended(self) -> ProcessEndedError:
        """The error for a process that ended by itself."""
        assert self._process is not None
        status = self._process.wait()  # its output is closed, so it has ended or is about to
        self.close()
        is_late = status in (-signal.SIGALRM, -signal.SIGPROF)
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return ProcessEndedError(how, is_late)


def _end(process: "subprocess.Popen[bytes]", *files: int) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # buffered data for a process that has ended
                pipe.close()
    process.wait()
    for file in files:
        os.close(file)


class Replies:
    """What the process sends: messages, each with the bytes that follow it."""

    def __init__(self, stream: IO[bytes], memory: int) -> None:
        self._stream, self._memory, self._num_bytes = stream, memory, 0
        self._room = memoryview(bytearray())

    def send(self, message: Mapping[str, Any], contents: Sequence[np.ndarray] = ()) -> None:
        """Send a message, and arrays behind it."""
        pieces = [json.dumps(message).encode() + b"\n", *(np.ascontiguousarray(one).data.cast("B") for one in contents)]
        for piece in pieces:  # all are computed by now: half a message would leave the reader waiting
            self._stream.write(piece)
        self._stream.flush()

    def shared(self, num_bytes: int) -> memoryview:
        """The first ``num_bytes`` of the shared memory.  Raises MemoryError above the limit of this process."""
        if self._num_bytes < num_bytes or self._num_bytes > _KEPT_BYTES:
            os.ftruncate(self._memory, 0)
            os.ftruncate(self._memory, num_bytes)
            try:
                self._room = memoryview(mmap(self._memory, num_bytes) if num_bytes else bytearray())
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                raise MemoryError from error
            self._num_bytes = num_bytes
        return self._room[:num_bytes]


def serve(answer: Callable[[dict[str, Any], bytes, Replies], None], memory: int, room_bytes: int) -> None:
    """Answer requests from standard input until it closes: the main function of the process.

    ``answer`` gets each request with its content.  ``room_bytes``: see ``limit_memory``.
    """
    ignore_stopping()
    requests, replies = sys.stdin.buffer, Replies(os.fdopen(os.dup(1), "wb"), memory)
    os.dup2(2, 1)  # output that a library prints must not mix with replies
    gc.freeze()
    limit_memory(room_bytes)
    with contextlib.suppress(BrokenPipeError):  # the parent has closed the pipe
        for line in requests:
            try:
                request = json.loads(line)
                answer(request, requests.read(request["num_content_bytes"]), replies)
            except UserError as error:
                replies.send({"problems": error.problems})
            except BrokenPipeError:
                raise
            except MemoryError:
                replies.send({"memory": room_bytes})
            except Exception:
                replies.send({"failure": traceback.format_exc()})
    os._exit(0)  # without flushing, which could fail


def limit_memory(room_bytes: int) -> None:
    """Let this process reserve at most ``room_bytes`` more memory than it has."""
    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = size + room_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


class Alarm:
    """Ends this process, whatever it is doing, when the blocks it guards take more than ``seconds`` in total."""

    def __init__(self, seconds: float, is_computing: bool = False) -> None:
        """``is_computing``: only count time in which this process uses a processor."""
        self._seconds, self._timer = seconds, signal.ITIMER_PROF if is_computing else signal.ITIMER_REAL

    def __enter__(self) -> None:
        signal.setitimer(self._timer, self._seconds)

    def __exit__(self, *_: object) -> None:
        self._seconds = signal.setitimer(self._timer, 0)[0]  # the time left for the next block
