"""The handle of a process that decodes images and videos (``answers.py``), within limits of time and memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np

from mm.data.limited import LimitedProcess, ProcessEndedError
from mm.data.media.picture import ResizeStep, quick_size
from mm.data.media.video_file import FRACTIONS, Pixels, VideoHeader, Wanted
from mm.data.sample import Inline
from mm.errors import UserError, add_note, refuse

PICTURE_SECONDS = 30.0
"""Limit for one image, in seconds of CPU time: a thousand times what an ordinary one takes."""
_MAX_VIDEOS = 1000
"""Restart the process after this many videos: FFmpeg and Python leak about 6 kB per video."""


class Decoder:
    """Reads images and videos in a process that starts with the first one and ends with this object.

    Pickles without its process.
    """

    def __init__(
        self, backend: str | None = None, limit_seconds: float = 300.0, picture_seconds: float = PICTURE_SECONDS
    ) -> None:
        """``backend``: "pyav", "decord" or "torchcodec"; None means PyAV.

        Reading a video is aborted when its header, or all its wanted frames together, take more than
        ``limit_seconds``; reading an image, when it takes more than ``picture_seconds`` of CPU time.
        """
        self.backend, self._limit_seconds, self._picture_seconds = backend or "pyav", limit_seconds, picture_seconds
        self._process = LimitedProcess("mm.data.media.answers")
        self._num_videos = 0
        """Videos read by the current process."""

    def check(self) -> None:
        """Raises UserError when the backend cannot be used on this machine."""
        with self._reading_video(self.backend) as process:
            why = process.ask({"task": "check", **self._of_video("")})["missing"]
        refuse([] if why is None else [
            f"video_backend is {self.backend!r}, which cannot be imported ({why}); install it, or use \"pyav\"."])

    def picture_size(self, path: str | Inline, is_upright: bool = True) -> tuple[int, int]:
        """As ``image_size``.  Also raises UserError for an image that takes too much time or memory."""
        quick = quick_size(path, is_upright)
        if quick is not None:
            return quick
        with self._reading_picture(path) as process:
            width, height = process.ask(*self._of_picture("size", path, is_upright=is_upright))["size"]
        return width, height

    def remarks(self, path: str | Inline) -> list[str]:
        """As ``image_remarks``.  Raises UserError as ``picture_size`` does."""
        with self._reading_picture(path) as process:
            return process.ask(*self._of_picture("remarks", path))["remarks"]

    def picture(self, path: str | Inline, is_upright: bool = True, is_fast: bool = False) -> Pixels:
        """The pixels of ``load_image``, or with ``is_fast`` those of ``load_pixels``.  Raises UserError as they do, and
        as ``picture_size`` does."""
        with self._reading_picture(path) as process:
            request = self._of_picture("picture", path, is_upright=is_upright, is_fast=is_fast)
            return process.shared(process.ask(*request)["shape"])

    def resized(
        self, path: str | Inline, size: tuple[int, int], steps: Sequence[ResizeStep], is_upright: bool, on_white: bool
    ) -> Pixels:
        """The pixels of ``load_image``, resized by Pillow in ``steps``.

        Raises UserError as ``picture`` does, and when the decoded image does not have the ``size`` (width, height) that
        its header states.
        """
        with self._reading_picture(path) as process:
            wanted = {"size": size, "steps": steps, "is_upright": is_upright, "on_white": on_white}
            request = self._of_picture("resized", path, **wanted)
            return process.shared(process.ask(*request)["shape"])

    def header(self, path: str, is_upright: bool) -> VideoHeader:
        """The header of the file.  Raises UserError as ``read_header`` does, and for a file that takes too much time or
        memory."""
        with self._reading_video(path) as process:
            if self._num_videos == _MAX_VIDEOS:
                process.close()
            if process.pid is None:
                self._num_videos = 0
            self._num_videos += 1
            reply = process.ask({"task": "header", "is_upright": is_upright, **self._of_video(path)})
            arrays = {name: np.frombuffer(process.read(8 * length), dtype=np.int64)
                      for name, length in reply.pop("lengths").items()}
        fractions = {name: Fraction(*reply.pop(name)) for name in FRACTIONS}
        return VideoHeader(**arrays, **fractions, **reply)

    def frames(self, path: str, wanted: Wanted) -> Iterator[Pixels]:
        """The wanted frames, in order.  Raises UserError as ``header`` does."""
        message = {**vars(wanted), "time_base": wanted.time_base.as_integer_ratio()}
        with self._reading_video(path) as process:
            process.ask({"task": "frames", "wanted": message, **self._of_video(path)})
            try:
                for _ in wanted.times:
                    shape = process.message()["shape"]
                    yield np.frombuffer(process.read(int(np.prod(shape))), dtype=np.uint8).reshape(shape)
            except (UserError, ProcessEndedError):  # the process is ready for the next request, or has ended
                raise
            except BaseException:  # unread frames must not be taken as the reply to the next request
                process.close()
                raise

    def close(self) -> None:
        """End the process, if there is one."""
        with self._process as process:
            process.close()

    def _of_video(self, path: str) -> dict[str, Any]:
        return {"path": path, "backend": self.backend, "limit_seconds": self._limit_seconds}

    def _of_picture(self, task: str, path: str | Inline, **wanted: Any) -> tuple[dict[str, Any], bytes]:
        """A request and its content."""
        request = {"task": task, "path": str(path), "limit_seconds": self._picture_seconds, **wanted}
        return (request, b"") if isinstance(path, str) else ({**request, "is_inline": True}, path.content)

    @contextmanager
    def _reading_video(self, path: str) -> Iterator[LimitedProcess]:
        with _reading(self._process, path, "video", (
            f"decoding took more than {self._limit_seconds:g} s; re-encode or remove the video, or raise video_timeout "
            f"in the data JSON.")) as process:
            yield process

    @contextmanager
    def _reading_picture(self, path: str | Inline) -> Iterator[LimitedProcess]:
        with _reading(self._process, path, "image", (
            f"decoding took more than {self._picture_seconds:g} s of CPU time; save the image again as a JPEG or "
            f"PNG file, or remove it.")) as process:
            yield process


@contextmanager
def _reading(reader: LimitedProcess, path: str | Inline, what: str, late: str) -> Iterator[LimitedProcess]:
    """Turn the end of the process into a UserError that names the file, which contains a ``what``."""
    cure = "re-encode or remove it." if what == "video" else "save it again as a JPEG or PNG file, or remove it."
    try:
        with reader as process:
            yield process
    except ProcessEndedError as error:
        if error.is_late:
            raise UserError(f"{path}: {late}") from None
        if error.is_large:
            raise UserError(f"{path}: decoding needs {error.how}; {cure}") from None
        raise UserError(f"{path}: its decoder ended {error.how}; the {what} is damaged, or memory ran out: {cure}"
                        ) from None
    except RuntimeError as error:
        add_note(error, f"while reading {path}")
        raise
