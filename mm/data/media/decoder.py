"""The process that reads video files for another one, and the handle that the other one has of it.

A decoder works on files of strangers in code that nothing can interrupt: it may run for ever or end its process.  So it
has one of its own, which the system ends when a video takes too long, and which is started again for the next video.
What the pixels are for is not known here.
"""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import traceback
import weakref
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import IO, Any

import numpy as np

from mm.data.media.animation import animation_frames, animation_header, is_animation
from mm.data.media.video_file import Pixels, VideoHeader, Wanted, read_header
from mm.data.media.video_frames import BACKENDS, missing_backend
from mm.errors import UserError, refuse

_COMMAND = (sys.executable, "-P", "-c", "from mm.data.media.decoder import serve; serve()")
_FRACTIONS = ("time_base", "stated_rate")
"""Fields of a header that JSON has no numbers for."""
_ARRAYS = ("times", "key_times", "key_seeks")
"""Fields that travel behind it, as 8 bytes each number."""
_MAX_VIDEOS = 1000
"""Then a new process reads: FFmpeg and Python lose some 6 kB with each video."""


class Decoder:
    """Reads videos in a process that starts with the first one and ends with this object.

    Pickles without its process.  One thread at a time may use it.
    """

    def __init__(self, backend: str | None, limit_seconds: float) -> None:
        """``backend``: "pyav", "decord" or "torchcodec"; None is PyAV.

        A header that takes more than ``limit_seconds``, or wanted frames that together take more, end the reading of
        their video.
        """
        self.backend, self._limit_seconds = backend or "pyav", limit_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._num_videos = 0
        """That the process has read."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None, "_num_videos": 0}

    def check(self) -> None:
        """Raises UserError when the backend cannot be used on this machine."""
        why = self._ask("check", "", backend=self.backend)["missing"]
        refuse([] if why is None else [
            f"video_backend is {self.backend!r}, which does not load here ({why}); install it, or take \"pyav\"."])

    def header(self, path: str, is_upright: bool) -> VideoHeader:
        """What the file holds; raises UserError as ``read_header`` does, and for a file that takes too long."""
        if self._num_videos == _MAX_VIDEOS:
            self.close()
        self._num_videos += 1
        reply = self._ask("header", path, is_upright=is_upright)
        arrays = {name: np.frombuffer(self._read(path, 8 * length), dtype=np.int64)
                  for name, length in reply.pop("lengths").items()}
        fractions = {name: Fraction(*reply.pop(name)) for name in _FRACTIONS}
        return VideoHeader(**arrays, **fractions, **reply)

    def frames(self, path: str, wanted: Wanted) -> Iterator[Pixels]:
        """The wanted frames, one after another; raises UserError as ``header`` does."""
        message = {**vars(wanted), "time_base": wanted.time_base.as_integer_ratio()}
        self._ask("frames", path, backend=self.backend, wanted=message)
        try:
            for _ in wanted.times:
                shape = self._reply(path)["shape"]
                yield np.frombuffer(self._read(path, int(np.prod(shape))), dtype=np.uint8).reshape(shape)
        except UserError:  # the process waits for the next request, or has ended
            raise
        except BaseException:  # not all was read: what is left must not answer the next request
            self.close()
            raise

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process, self._num_videos = self._process, None, 0
        if process is not None:
            _end(process)

    def _ask(self, task: str, path: str, **arguments: Any) -> dict[str, Any]:
        if self._process is None:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            weakref.finalize(self, _end, self._process)
        message = {"task": task, "path": path, "limit_seconds": self._limit_seconds, **arguments}
        pipe: Any = self._process.stdin
        try:
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._ended(path) from None
        return self._reply(path)

    def _reply(self, path: str) -> dict[str, Any]:
        """The next line of the process; raises UserError with the problems that it tells."""
        pipe: Any = self._process and self._process.stdout
        line = pipe.readline()
        if not line:
            raise self._ended(path)
        reply = json.loads(line)
        if "problems" in reply:
            raise UserError(reply["problems"])
        if "failure" in reply:
            self.close()
            raise RuntimeError(f"while reading {path}:\n{reply['failure']}")
        return reply

    def _read(self, path: str, num_bytes: int) -> bytes:
        pipe: Any = self._process and self._process.stdout
        found = pipe.read(num_bytes)
        if len(found) < num_bytes:
            raise self._ended(path)
        return found

    def _ended(self, path: str) -> UserError:
        """The process has ended by itself: why."""
        process, self._process = self._process, None
        assert process is not None
        status = process.wait()
        _end(process)
        if status == -signal.SIGALRM:
            return UserError(f"{path}: its decoder took more than {self._limit_seconds:g} s; re-encode or remove the "
                             f"video, or raise video_timeout in the data JSON.")
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return UserError(f"{path}: its decoder ended {how}; the video is damaged, or memory ran out: re-encode or "
                         f"remove it.")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # by what was not yet sent to a process that has ended
                pipe.close()
    process.wait()


def serve() -> None:
    """Answer requests on standard input until it ends.  The main program of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asks decides
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply
    gc.freeze()
    with contextlib.suppress(BrokenPipeError):  # nobody reads any more
        for line in requests:
            gc.collect()  # a frame that was asked how it is turned refers to itself, and is megabytes
            try:
                _answer(json.loads(line), replies)
            except UserError as error:
                _tell(replies, {"problems": error.problems})
            except BrokenPipeError:
                raise
            except Exception:
                _tell(replies, {"failure": traceback.format_exc()})
    os._exit(0)  # without a last try to write


def _answer(request: dict[str, Any], replies: IO[bytes]) -> None:
    match request["task"]:
        case "check":
            with _Alarm(request["limit_seconds"]):
                missing = missing_backend(request["backend"])
            _tell(replies, {"missing": missing})
        case "header":
            _send_header(request, replies)
        case "frames":
            _send_frames(request, replies)


def _send_header(request: dict[str, Any], replies: IO[bytes]) -> None:
    with _Alarm(request["limit_seconds"]):
        path = request["path"]
        header = vars(animation_header(path) if is_animation(path) else read_header(path, request["is_upright"]))
    arrays = {name: header.pop(name) for name in _ARRAYS}
    fractions = {name: header[name].as_integer_ratio() for name in _FRACTIONS}
    lengths = {name: len(array) for name, array in arrays.items()}
    _tell(replies, {**header, **fractions, "lengths": lengths}, tuple(arrays.values()))


def _send_frames(request: dict[str, Any], replies: IO[bytes]) -> None:
    """As many as are wanted, and nothing behind the last one, which would answer the next request."""
    wanted = request["wanted"]
    wanted = Wanted(**{**wanted, "time_base": Fraction(*wanted["time_base"])})
    path = request["path"]
    frames = animation_frames(path, wanted) if is_animation(path) else BACKENDS[request["backend"]](path, wanted)
    _tell(replies, {})
    alarm = _Alarm(request["limit_seconds"])
    for _ in wanted.times:
        with alarm:  # not while the reader makes this process wait
            frame = next(frames)
        _tell(replies, {"shape": frame.shape}, (frame,))


class _Alarm:
    """The system ends this process, whatever it does, when what is inside takes too long, all its times together."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        self._seconds = signal.setitimer(signal.ITIMER_REAL, 0)[0]  # what is left for the next time


def _tell(replies: IO[bytes], message: dict[str, Any], contents: Sequence[np.ndarray] = ()) -> None:
    parts = [json.dumps(message).encode() + b"\n", *(np.ascontiguousarray(one).data.cast("B") for one in contents)]
    for part in parts:  # all could be made: half of a reply would leave its reader waiting
        replies.write(part)
    replies.flush()
