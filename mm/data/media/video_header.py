"""Reads the headers of video files, decoding at most the first frame."""

import contextlib
import gc
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.error import FFmpegError
from packaging.version import Version

from mm.data.media.image_decode import MAX_IMAGE_PIXELS, format_of, known_content
from mm.errors import UserError

MAX_SCANNED_BYTES = 1 << 30
"""In larger files, packets are not all scanned if the file's index gives the number of frames."""
_MPEG = ("mpegts", "mpeg")
"""Formats without an index, where a seek finds packets by decoding time."""
_DURATION = re.compile(r"(\d+):(\d+):(\d+(?:\.\d*)?)")
"""How Matroska files state the duration of a stream."""
_FORMATS = ("mov", "mp4", "m4a", "3gp", "3g2", "mj2", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "asf", "ogg")
"""Only formats that contain the video itself: a playlist could name any other file or URL."""
_OPTIONS = {"format_whitelist": ",".join((*_FORMATS, "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")),
            "protocol_whitelist": "file"}  # fmt: skip
_METADATA: dict[str, Any] = {"metadata_errors": "replace"} if Version(av.__version__).major < 19 else {}
"""For tags that are not UTF-8.  PyAV 19 accepts them, and no longer has the setting."""


@dataclass(frozen=True)
class VideoHeader:
    """What is known about a video before its frames are decoded.  Times are in units of ``time_base`` seconds."""

    width: int
    """After rotation, if ``is_upright`` was requested; ``height`` likewise."""
    height: int
    time_base: Fraction
    times: np.ndarray
    """int64 [num_frames]: start of each frame, in display order."""
    key_times: np.ndarray
    """int64: start of each frame at which decoding can begin, in display order."""
    key_seeks: np.ndarray
    """int64: for each key frame, the time to seek to.  MPEG streams are searched by decoding time."""
    last_duration: int = 0
    """Stated duration of the last frame; 0 if the file does not state it.  The next two fields likewise."""
    stated_duration: int = 0
    """Duration of the whole video."""
    stated_rate: Fraction = Fraction(0)
    """Frames per second.  Often wrong, like the durations."""
    is_exact: bool = True
    """False: the file is too large to be scanned, so ``times`` are evenly spaced over its duration."""


@dataclass(frozen=True)
class Wanted:
    """Frames to decode."""

    numbers: tuple[int, ...]
    """In display order: ascending and unique.  The next four have an entry for each."""
    times: tuple[int, ...]
    """Its start."""
    starts: tuple[int, ...]
    """The key frame at which its decoding can begin."""
    seeks: tuple[int, ...]
    """The time to seek to for that key frame."""
    earlier_seeks: tuple[int, ...]
    """The same for the key frame before it."""
    reach: int
    """How much earlier than wanted the found frame may start."""
    time_base: Fraction
    is_upright: bool


Pixels = np.ndarray
"""uint8 [height, width, 3], RGB."""


@contextlib.contextmanager
def opened(path: str) -> Iterator[tuple[Any, Any]]:
    """Container and video stream of a file.  FFmpeg's and I/O errors become UserErrors that name the file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UserError(f"{path}: is not a regular file; expected a video.")
        with _container(path) as container:
            if not container.streams.video:
                raise UserError(f"{path}: has no video stream; remove the sample.")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise UserError(f"{path}: no decoder here supports its video codec; re-encode it, for example as H.264 "
                                f"in MP4.")
            stream.thread_count = 1  # each data worker already has its own process
            check_size(path, stream.width, stream.height)
            yield container, stream
    except FFmpegError as error:
        raise UserError(f"{path}: is damaged or truncated ({error.strerror}); replace, re-encode or remove the video."
                        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from error
    finally:
        gc.collect()  # a frame whose side data was read is in a reference cycle, and has megabytes


def _container(path: str) -> Any:
    try:
        return av.open(f"file:{os.path.abspath(path)}", options=_OPTIONS, **_METADATA)
    except FFmpegError as error:
        if (image_format := format_of(path)) is not None:
            raise UserError(f"{path}: is an image ({image_format}), not a video of a known format; use it as an image, "
                            f"or give the video as a list of its frames.") from error
        with open(path, "rb") as stream:
            known = known_content(stream.read(200))
        if known is not None and not known[0].startswith("a video"):
            raise UserError(f"{path}: is not a video of a known format: it is {known[0]}; {known[1]}.") from error
        raise UserError(
            f"{path}: is not a video of a known format, or is damaged or truncated ({error.strerror}); an MP4 file "
            f"without its index ('moov') is unfinished: replace, repair or remove it.") from error


def check_size(path: str, width: int, height: int) -> None:
    """Raise UserError for frames without a size, or larger than an image may be (8K has 33 million pixels)."""
    if not width or not height:
        raise UserError(f"{path}: its video has no size; it is damaged or truncated: replace or remove it.")
    if width * height > MAX_IMAGE_PIXELS:
        raise UserError(f"{path}: has {width} x {height} pixels per frame, above {MAX_IMAGE_PIXELS}; make it smaller.")


def read_header(path: str, is_upright: bool) -> VideoHeader:
    """Read all packets without decoding them, and decode the first frame for its size and rotation.

    Frames whose key frame was cut off are not counted.  Raises UserError naming ``path`` when it is not a regular file
    or not a video, is truncated, or has more than ``MAX_IMAGE_PIXELS`` per frame.
    """
    with opened(path) as (container, stream):
        is_exact = not stream.frames or os.path.getsize(path) <= MAX_SCANNED_BYTES
        index = (_scan if is_exact else _spread)(path, container, stream)
        container.seek(int(index.key_seeks[0]), stream=stream)
        first = next(_frames(container, stream), None)
        if first is None:
            container.seek(before_all(stream), stream=stream)
            first = next(_frames(container, stream), None)
        if first is None:
            raise UserError(f"{path}: has no frame that can be decoded; replace or remove the video.")
        check_size(path, first.width, first.height)
        a, b, _, _ = matrix_of(first) if is_upright else UNTURNED
        width, height = (first.height, first.width) if abs(b) > abs(a) else (first.width, first.height)
        times = index.times[index.times >= min(first.pts, index.first_key_time)]
        return VideoHeader(width, height, _exact(stream.time_base), times, index.key_times, index.key_seeks,
                           index.last_duration, stream.duration or 0, _exact(stream.average_rate), is_exact)


def _exact(ratio: Any) -> Fraction:
    """A ratio of PyAV; 0 if the file states none.  The own type of PyAV 19 approximates products."""
    return Fraction(ratio.numerator, ratio.denominator) if ratio else Fraction(0)


def before_all(stream: Any) -> int:
    """A time before the first packet, even if decoding starts before the first displayed frame."""
    return (stream.start_time or 0) - int(10 / _exact(stream.time_base))


@dataclass(frozen=True)
class _Index:
    """The frames of a stream, found without decoding.  Fields as in ``VideoHeader``."""

    times: np.ndarray
    key_times: np.ndarray
    key_seeks: np.ndarray
    first_key_time: int
    """The very first key frame, displayed or not."""
    last_duration: int = 0


def _scan(path: str, container: Any, stream: Any) -> _Index:
    times: list[int] = []
    durations: dict[int, int] = {}
    key_seeks: dict[int, int] = {}
    first_key_time, num_packets = None, 0
    is_mpeg = container.format.name in _MPEG
    for packet in container.demux(stream):
        if packet.size == 0:
            continue
        num_packets += 1
        time = packet.dts if packet.pts is None else packet.pts
        if packet.is_corrupt or time is None:
            what = "is truncated or damaged" if packet.is_corrupt else "has a frame without a timestamp"
            raise UserError(f"{path}: {what}, at frame {num_packets - 1}; replace, re-encode or remove the video.")
        if packet.is_keyframe and first_key_time is None:
            first_key_time = time
        if packet.is_discard:  # excluded by an edit list
            continue
        times.append(time)
        durations[time] = packet.duration or 0
        if packet.is_keyframe:
            key_seeks[time] = packet.dts if is_mpeg and packet.dts is not None else time
    if not times:
        raise UserError(f"{path}: its video stream has no frames; replace or remove the video.")
    _check_whole(path, stream, num_packets, (max(times) - min(times)) * _exact(stream.time_base))
    ordered = np.unique(np.array(times, dtype=np.int64))
    begin = int(ordered[0])
    keys = np.array(sorted(key_seeks.items()) or [(begin, begin)], dtype=np.int64)
    return _Index(ordered, keys[:, 0], keys[:, 1], begin if first_key_time is None else first_key_time,
                  durations[int(ordered[-1])])


def _check_whole(path: str, stream: Any, num_packets: int, seconds: Fraction) -> None:
    """Refuse a file that contains less than it states."""
    if num_packets < stream.frames:
        raise UserError(f"{path}: is truncated: it states {stream.frames} frames but has {num_packets}; replace or "
                        f"remove the video.")
    duration = _DURATION.fullmatch(stream.metadata.get("DURATION", ""))
    stated = sum(factor * float(one) for factor, one in zip((3600, 60, 1), duration.groups(), strict=True)) if (
        duration) else 0.0
    if seconds + 1 < 0.9 * stated:
        raise UserError(f"{path}: is truncated: it states a duration of {stated:.1f} s but ends after "
                        f"{float(seconds):.1f} s; replace or remove the video.")


def _spread(path: str, container: Any, stream: Any) -> _Index:
    """The same for a large file, from its index and its last packets only."""
    entries = stream.index_entries
    if len(entries) and entries[-1].pos + entries[-1].size > os.path.getsize(path):
        raise UserError(f"{path}: is truncated: its index refers to data beyond its end; replace or remove the video.")
    first = stream.start_time or 0
    key_times = np.array([entry.timestamp for entry in entries if entry.is_keyframe] or [first], dtype=np.int64)
    container.seek(int(key_times.max()), stream=stream)
    last = max((packet.pts for packet in container.demux(stream) if packet.size and packet.pts is not None),
               default=first)
    times = np.linspace(first, last, stream.frames).round().astype(np.int64)
    return _Index(times, key_times, key_times, int(times[0]))


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Decoded frames with a timestamp, from the container's current position."""
    for frame in container.decode(stream):
        frame.pts = frame.dts if frame.pts is None else frame.pts
        if frame.pts is not None:
            yield frame


DisplayMatrix = tuple[int, int, int, int]
"""The rotation stored in a file: (x, y) goes to (a x + c y, b x + d y), as (a, b, c, d)."""
UNTURNED = (1, 0, 0, 1)


def matrix_of(frame: Any) -> DisplayMatrix:
    """The rotation of a decoded frame, from its side data; ``UNTURNED`` if it has none."""
    found = frame.side_data.get("DISPLAYMATRIX")
    if found is None:
        return UNTURNED
    a, b, _, c, d, *_ = np.frombuffer(bytes(found), dtype=np.int32).tolist()
    return a, b, c, d
