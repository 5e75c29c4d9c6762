"""Selected frames of videos, decoded by PyAV, decord or torchcodec, and of animated images, decoded by Pillow.

Animations are composited on white, as FFmpeg does for GIFs.
"""

import contextlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from importlib import import_module
from typing import Any

import numpy as np
from av.error import FFmpegError
from PIL import Image

from mm.data.media.image_decode import to_rgb
from mm.data.media.video_header import (
    UNTURNED,
    DisplayMatrix,
    Pixels,
    VideoHeader,
    Wanted,
    before_all,
    check_size,
    matrix_of,
    opened,
)
from mm.errors import UserError

_FORMATS = ("GIF", "WEBP", "PNG")
_BASE = Fraction(1, 1000)
_USUAL_MS = 100
"""Duration of a frame that states none, or of a GIF frame below 20 ms.  FFmpeg and browsers do the same."""
_LEAST_GIF_MS = 20


def is_animation(path: str) -> bool:
    """Whether a file starts like an animated image.  A GIF counts even with a single frame."""
    start = b""
    with suppress(OSError):  # opening it as a video reports the error
        if stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb") as file:
                start = file.read(1 << 16)
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return b"ANIM" in start[12:64]
    is_png = start[:8] == b"\x89PNG\r\n\x1a\n" and b"acTL" in start.split(b"IDAT", 1)[0]
    return is_png or start[:4] == b"GIF8"


def animation_header(path: str) -> VideoHeader:
    """Raises UserError naming ``path`` when it is truncated, damaged or too large."""
    with _opened(path) as image:
        check_size(path, image.width, image.height)
        times, begin, shown = [], 0.0, 0.0
        for number in range(_num_hidden(image), getattr(image, "n_frames", 1)):
            image.seek(number)
            if image.format == "WEBP":
                image.load()  # finds its duration
            stated = float(image.info.get("duration", 0))
            shown = stated if stated >= (_LEAST_GIF_MS if image.format == "GIF" else 1) else _USUAL_MS
            times.append(round(begin))
            begin += shown
    ticks = np.array(times, dtype=np.int64)
    return VideoHeader(image.width, image.height, _BASE, ticks, ticks, ticks, round(shown), round(begin))


def _animation_frames(path: str, wanted: Wanted) -> Iterator[Pixels]:
    with _opened(path) as image:
        first = _num_hidden(image)
        for number in wanted.numbers:
            image.seek(first + number)
            yield np.array(to_rgb(image))


def _num_hidden(image: Image.Image) -> int:
    """Number of hidden frames before the first: a PNG may contain an image for viewers without animation support."""
    return 1 if image.info.get("default_image") else 0


@contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    try:
        with Image.open(path, formats=_FORMATS) as image:
            yield image
    except (UserError, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise many error types on broken files
        raise UserError(f"{path}: the animated image is damaged or truncated ({error}); replace, re-encode or remove "
                        f"it.") from error


def frames_of(path: str, wanted: Wanted, backend: str) -> Iterator[Pixels]:
    """The wanted frames of a video or animation, in order.

    Raises UserError naming the file and, where it is known, the time of a frame that is missing or damaged.
    """
    return _animation_frames(path, wanted) if is_animation(path) else BACKENDS[backend](path, wanted)


def _pyav_frames(path: str, wanted: Wanted) -> Iterator[Pixels]:
    """One at a time; between frames that are far apart it seeks to a key frame."""
    with opened(path) as (container, stream):
        search = _Search(path, container, stream, wanted)
        for number in range(len(wanted.times)):
            yield _turned(search.find(number).to_ndarray(format="rgb24"), search.matrix or UNTURNED)


class _Search:
    """Finds wanted frames one after another, decoding no more than necessary."""

    def __init__(self, path: str, container: Any, stream: Any, wanted: Wanted) -> None:
        self._path, self._container, self._stream, self._wanted = path, container, stream, wanted
        stream.codec_context.copy_opaque = True  # lets a frame carry the number of its packet
        if stream.codec_context.name == "hevc":  # raise where the encoder's checksum of a picture does not match
            stream.codec_context.options = {**stream.codec_context.options, "err_detect": "crccheck+explode"}
        self._frames: Iterator[tuple[Any, str | None]] = iter(())
        self._reports: list[tuple[int, str]] = []
        """Damage that FFmpeg has reported since the last seek, by the number of the packet."""
        self._begin = 0
        """The time of the last seek; decoding continues from there."""
        self._current: tuple[Any, str | None] | None = None
        """The last frame that starts early enough, with its damage if any; ``_following`` is the frame after it."""
        self._following: tuple[Any, str | None] | None = None
        self.matrix: DisplayMatrix | None = None

    def find(self, number: int) -> Any:
        """The wanted frame ``number``; call it with ascending numbers.

        A seek can land too late.  And in an open group of pictures, a frame shown before its key frame depends on
        earlier frames.  In both cases decoding restarts one key frame earlier, and if that is still too late, at the
        beginning.  Raises UserError for a frame that is missing or damaged.
        """
        wanted, problem = self._wanted, "is missing"
        time, nearest, earlier = wanted.times[number], wanted.seeks[number], wanted.earlier_seeks[number]
        begins = list(dict.fromkeys((nearest, earlier, before_all(self._stream))))
        if self._is_near(wanted.starts[number] - wanted.reach):
            begins = [self._begin, *(begin for begin in begins if begin != self._begin)]
        else:
            self._seek(nearest)
        for begin in begins:
            if begin != self._begin:
                self._seek(begin)
            found = self._advance(time)
            if found is None:
                continue
            frame, damage = found
            if time - frame.pts <= wanted.reach and damage is None:
                return frame
            cause = damage or (self._reports[-1][1] if self._reports else None)
            problem = "is missing" if cause is None else f"is damaged ({cause})"
            if self._begin < nearest:
                break  # it was decoded together with everything it depends on
        raise UserError(f"{self._path}: the frame at {float(time * wanted.time_base):.2f} s {problem}; replace, "
                        f"re-encode or remove the video.")

    def _is_near(self, start: int) -> bool:
        """Whether decoding on is faster than a seek, because no key frame at ``start`` comes in between."""
        if self._following is None:
            return self._current is not None  # everything is decoded
        return self._following[0].pts >= start

    def _seek(self, time: int) -> None:
        self._frames, self._begin = iter(()), time
        with contextlib.suppress(PermissionError):  # AVI files cannot seek to before their first frame
            self._container.seek(time, stream=self._stream)
            self._frames = self._decoded()
        self._current, self._following = None, next(self._frames, None)
        # Only for one frame: a frame whose side data was read is freed by the garbage collector alone.
        if self.matrix is None and self._following is not None:
            self.matrix = matrix_of(self._following[0]) if self._wanted.is_upright else UNTURNED

    def _advance(self, time: int) -> tuple[Any, str | None] | None:
        """The last frame that starts at ``time`` or before; None if decoding started too late for it."""
        while self._following is not None and self._following[0].pts <= time:
            self._current, self._following = self._following, next(self._frames, None)
        return self._current

    def _decoded(self) -> Iterator[tuple[Any, str | None]]:
        """Decoded frames from the container's position, each with the first damage that FFmpeg reported from the last
        key frame before it up to itself."""
        keys = deque[tuple[int, int]](maxlen=32)  # more than a decoder reorders
        self._reports = reports = []
        for number, packet in enumerate(self._container.demux(self._stream)):
            packet.opaque = number
            time = packet.dts if packet.pts is None else packet.pts
            if packet.is_keyframe and time is not None:
                keys.append((number, time))
            if packet.is_corrupt:
                reports.append((number, "part of its packet is missing"))
            frames: list[Any] = []
            try:
                frames = packet.decode()
            except FFmpegError as error:
                reports.append((number, str(error.strerror)))
            for frame in frames:
                frame.pts = frame.dts if frame.pts is None else frame.pts
                if frame.pts is None:
                    continue
                at = number if frame.opaque is None else frame.opaque
                if frame.is_corrupt:
                    reports.append((at, "its decoder reports it as corrupt"))
                begin = max((key for key, begun in keys if key <= at and begun <= frame.pts), default=0)
                yield frame, next((what for one, what in reports if begin <= one <= at), None)


def _turned(pixels: Pixels, matrix: DisplayMatrix) -> Pixels:
    """A frame rotated by multiples of 90 degrees and mirrored."""
    a, b, c, d = matrix
    if abs(b) > abs(a):
        pixels, a, d = pixels.transpose(1, 0, 2), c, b
    return np.ascontiguousarray(pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1])


def _decord_frames(path: str, wanted: Wanted) -> Iterator[Pixels]:
    """Refuses files rotated by 90 degrees: decord garbles their rows."""
    decord: Any = import_module("decord")
    a, b, _, d = _first_matrix(path)
    if abs(b) > abs(a) or (not wanted.is_upright and (a < 0 or d < 0)):
        raise UserError(f"{path}: is rotated by its metadata, which decord gets wrong; set video_backend to \"pyav\".")
    try:
        reader = decord.VideoReader(path, num_threads=1)
        begins = reader.get_frame_timestamp(range(len(reader)))[:, 0]
        for time in wanted.times:
            number = int(np.abs(begins - float(time * wanted.time_base)).argmin())
            _check_time(path, float(begins[number]), time, wanted)
            yield reader[number].asnumpy()
    except decord.DECORDError as error:
        raise UserError(f"{path}: decord cannot decode it ({str(error).splitlines()[-1]}); try video_backend = "
                        f"\"pyav\", or replace the video.") from error


def _torchcodec_frames(path: str, wanted: Wanted) -> Iterator[Pixels]:
    """torchcodec always rotates frames upright."""
    decoders: Any = import_module("torchcodec.decoders")
    if not wanted.is_upright and _first_matrix(path) != UNTURNED:
        raise UserError(f"{path}: is rotated by its metadata, which torchcodec always applies and \"image_resize\": "
                        f"\"llamafactory\" does not; set video_backend to \"pyav\", or image_exif to true.")
    try:
        decoder = decoders.VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact")
        for number, time in zip(wanted.numbers, wanted.times, strict=True):
            frame = decoder.get_frame_at(number)
            _check_time(path, frame.pts_seconds, time, wanted)
            yield frame.data.numpy()
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: torchcodec cannot decode it ({error}); try video_backend = \"pyav\", or replace the "
                        f"video.") from error


def _first_matrix(path: str) -> DisplayMatrix:
    with opened(path) as (container, stream):
        frame = next(container.decode(stream), None)
        return UNTURNED if frame is None else matrix_of(frame)


def _check_time(path: str, seconds: float, time: int, wanted: Wanted) -> None:
    """Refuse a frame that starts at the wrong time.  decord stores seconds in single precision."""
    expected = float(time * wanted.time_base)
    if abs(seconds - expected) > 0.002 + float(wanted.reach * wanted.time_base):
        raise UserError(f"{path}: the frame at {expected:.2f} s is missing; replace, re-encode or remove the video.")


BACKENDS: dict[str, Callable[[str, Wanted], Iterator[Pixels]]] = {
    "pyav": _pyav_frames, "decord": _decord_frames, "torchcodec": _torchcodec_frames}


def missing_backend(name: str) -> str | None:
    """Why a backend cannot be used on this machine, or None."""
    try:
        import_module({"pyav": "av", "decord": "decord", "torchcodec": "torchcodec.decoders"}[name])
    except Exception as error:  # missing shared libraries raise many error types
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None
