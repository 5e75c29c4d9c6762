"""A separate process that decodes video files, and the handle that controls it.

Decoders run code on untrusted files that nothing can interrupt: it may hang or crash.  So decoding has its own process,
which the system ends when a video takes too long, and which restarts for the next video.
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
from mm.signals import ignore_stopping

_COMMAND = (sys.executable, "-P", "-c", "from mm.data.media.decoder import serve; serve()")
_FRACTIONS = ("time_base", "stated_rate")
"""Header fields that JSON numbers cannot represent."""
_ARRAYS = ("times", "key_times", "key_seeks")
"""Header fields sent after the JSON, with 8 bytes per number."""
_MAX_VIDEOS = 1000
"""Restart the process after this many videos: FFmpeg and Python leak about 6 kB per video."""


class Decoder:
    """Reads videos in a process that starts with the first video and ends with this object.

    Pickles without its process.  Not thread-safe.
    """

    def __init__(self, backend: str | None, limit_seconds: float) -> None:
        """``backend``: "pyav", "decord" or "torchcodec"; None means PyAV.

        Reading of a video is aborted when its header, or all its wanted frames together, take more than
        ``limit_seconds``.
        """
        self.backend, self._limit_seconds = backend or "pyav", limit_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._num_videos = 0
        """Videos read by the current process."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None, "_num_videos": 0}

    def check(self) -> None:
        """Raises UserError when the backend cannot be used on this machine."""
        why = self._ask("check", "", backend=self.backend)["missing"]
        refuse([] if why is None else [
            f"video_backend is {self.backend!r}, which cannot be imported ({why}); install it, or use \"pyav\"."])

    def header(self, path: str, is_upright: bool) -> VideoHeader:
        """The header of the file.  Raises UserError as ``read_header`` does, and for a file that takes too long."""
        if self._num_videos == _MAX_VIDEOS:
            self.close()
        self._num_videos += 1
        reply = self._ask("header", path, is_upright=is_upright)
        arrays = {name: np.frombuffer(self._read(path, 8 * length), dtype=np.int64)
                  for name, length in reply.pop("lengths").items()}
        fractions = {name: Fraction(*reply.pop(name)) for name in _FRACTIONS}
        return VideoHeader(**arrays, **fractions, **reply)

    def frames(self, path: str, wanted: Wanted) -> Iterator[Pixels]:
        """The wanted frames, in order.  Raises UserError as ``header`` does."""
        message = {**vars(wanted), "time_base": wanted.time_base.as_integer_ratio()}
        self._ask("frames", path, backend=self.backend, wanted=message)
        try:
            for _ in wanted.times:
                shape = self._reply(path)["shape"]
                yield np.frombuffer(self._read(path, int(np.prod(shape))), dtype=np.uint8).reshape(shape)
        except UserError:  # the process is ready for the next request, or has ended
            raise
        except BaseException:  # unread frames must not be taken as the reply to the next request
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
        """The next line from the process.  Raises UserError with the problems that it reports."""
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
        """The error for a process that ended by itself."""
        process, self._process = self._process, None
        assert process is not None
        status = process.wait()
        _end(process)
        if status == -signal.SIGALRM:
            return UserError(f"{path}: decoding took more than {self._limit_seconds:g} s; re-encode or remove the "
                             f"video, or raise video_timeout in the data JSON.")
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return UserError(f"{path}: its decoder ended {how}; the video is damaged, or memory ran out: re-encode or "
                         f"remove it.")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # buffered data for a process that has ended
                pipe.close()
    process.wait()


def serve() -> None:
    """Answer requests from standard input until it closes.  The main function of the process."""
    ignore_stopping()
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a library prints must not mix with replies
    gc.freeze()
    with contextlib.suppress(BrokenPipeError):  # the parent has closed the pipe
        for line in requests:
            gc.collect()  # a frame whose side data was read is in a reference cycle, and has megabytes
            try:
                _answer(json.loads(line), replies)
            except UserError as error:
                _send(replies, {"problems": error.problems})
            except BrokenPipeError:
                raise
            except Exception:
                _send(replies, {"failure": traceback.format_exc()})
    os._exit(0)  # without flushing, which could fail


def _answer(request: dict[str, Any], replies: IO[bytes]) -> None:
    match request["task"]:
        case "check":
            with _Alarm(request["limit_seconds"]):
                missing = missing_backend(request["backend"])
            _send(replies, {"missing": missing})
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
    _send(replies, {**header, **fractions, "lengths": lengths}, tuple(arrays.values()))


def _send_frames(request: dict[str, Any], replies: IO[bytes]) -> None:
    """Send exactly the wanted frames: anything after the last would be taken as the next reply."""
    wanted = request["wanted"]
    wanted = Wanted(**{**wanted, "time_base": Fraction(*wanted["time_base"])})
    path = request["path"]
    frames = animation_frames(path, wanted) if is_animation(path) else BACKENDS[request["backend"]](path, wanted)
    _send(replies, {})
    alarm = _Alarm(request["limit_seconds"])
    for _ in wanted.times:
        with alarm:  # excludes the time in which this process waits for the reader
            frame = next(frames)
        _send(replies, {"shape": frame.shape}, (frame,))


class _Alarm:
    """Ends this process, whatever it is doing, when the blocks it guards take more than ``seconds`` in total."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        self._seconds = signal.setitimer(signal.ITIMER_REAL, 0)[0]  # the time left for the next block


def _send(replies: IO[bytes], message: dict[str, Any], contents: Sequence[np.ndarray] = ()) -> None:
    pieces = [json.dumps(message).encode() + b"\n", *(np.ascontiguousarray(one).data.cast("B") for one in contents)]
    for piece in pieces:  # all are computed by now: half a reply would leave the reader waiting
        replies.write(piece)
    replies.flush()
