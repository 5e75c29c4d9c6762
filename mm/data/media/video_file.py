"""Video files: what they hold, without decoding more than the first frame.  Runs in a process that can be killed.

Which frames are chosen, and what becomes of them, is not known here.  Nothing here loads torch.
"""

import contextlib
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

from mm.data.media.picture import format_of, known_content
from mm.data.media.video_damage import heard
from mm.errors import UserError

MAX_FRAME_PIXELS = 50_000_000
"""Of one frame, as of a picture; 8K has 33 million."""
MAX_SCANNED_BYTES = 1 << 30
"""The packets of a larger file are not all read, where its index says how many frames there are."""
MAX_FRAMES = 20_000_000
"""A week at 30 a second, about."""
MAX_SECONDS = 30 * 24 * 3600
"""Between the first frame and the last one; damaged times can be any number."""
_MPEG = ("mpegts", "mpeg")
"""Formats without an index, in which a seek finds packets by the time at which they are decoded."""
_DURATION = re.compile(r"(\d+):(\d+):(\d+(?:\.\d*)?)")
"""How Matroska files say how long a stream is."""
_FORMATS = ("mov", "mp4", "m4a", "3gp", "3g2", "mj2", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "asf", "ogg")
"""Only formats that hold a video by themselves: a play list could name any other file or address."""
_OPTIONS = {"format_whitelist": ",".join((*_FORMATS, "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")),
            "protocol_whitelist": "file"}  # fmt: skip


@dataclass(frozen=True)
class VideoHeader:
    """What is known of a video before its frames are decoded.  Times are in units of ``time_base`` seconds."""

    width: int
    """Upright, like ``height``, if ``is_upright`` was asked for."""
    height: int
    time_base: Fraction
    times: np.ndarray
    """int64 [num_frames]: when each frame begins, in the order in which they are shown."""
    key_times: np.ndarray
    """int64: of the frames at which decoding can begin, in the same order."""
    key_seeks: np.ndarray
    """int64: for each of them, the time with which a seek finds it.  MPEG streams are searched by decoding times."""
    last_duration: int = 0
    """Of the last frame, as the file says; 0 where it does not, like what follows."""
    stated_duration: int = 0
    """Of the whole video."""
    stated_rate: Fraction = Fraction(0)
    """Frames of a second.  Often wrong, like the durations."""
    is_exact: bool = True
    """Else the file is too large to be scanned, and ``times`` are spread evenly over its length."""


@dataclass(frozen=True)
class Wanted:
    """Frames to decode."""

    numbers: tuple[int, ...]
    """In the order in which they are shown; rising, and none twice."""
    times: tuple[int, ...]
    """When each begins."""
    starts: tuple[int, ...]
    """The key frame at which decoding of each can begin."""
    seeks: tuple[int, ...]
    """With which a seek finds that key frame."""
    earlier_seeks: tuple[int, ...]
    """The same of the key frame before it."""
    reach: int
    """How much earlier the frame may begin that is found there."""
    time_base: Fraction
    is_upright: bool


Pixels = np.ndarray
"""uint8 [height, width, 3], red, green and blue."""


@contextlib.contextmanager
def opened(path: str) -> Iterator[tuple[Any, Any]]:
    """Container and video stream of a file; errors of either become UserErrors that name it."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UserError(f"{path}: is no regular file; expected a video.")
        with _container(path) as container:
            if not container.streams.video:
                raise UserError(f"{path}: has no video stream, only {_held(container)}; remove the sample.")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise UserError(f"{path}: its video is of a kind that no decoder here knows; re-encode it, for example "
                                f"as H.264 in MP4.")
            stream.thread_count = 1  # there is a process for each data worker
            _check_size(path, stream.width, stream.height)
            yield container, stream
    except FFmpegError as error:
        raise UserError(f"{path}: is damaged or cut short ({error.strerror}); replace, re-encode or remove the video."
                        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from error


def _container(path: str) -> Any:
    try:
        return av.open(f"file:{os.path.abspath(path)}", options=_OPTIONS, metadata_errors="replace")
    except PermissionError:
        raise
    except FFmpegError as error:
        if os.path.getsize(path) == 0:
            raise UserError(f"{path}: is empty; replace or remove the video.") from error
        if (picture := format_of(path)) is not None:
            raise UserError(f"{path}: is no video of a known format, but a picture ({picture}); show it as an image, "
                            f"or give the video as a list of its frames.") from error
        with open(path, "rb") as stream:
            known = known_content(stream.read(200))
        if known is not None and not known[0].startswith("a video"):
            raise UserError(f"{path}: is no video of a known format: it is {known[0]}; {known[1]}.") from error
        raise UserError(
            f"{path}: is no video of a known format, or damaged or cut short ({error.strerror}); an MP4 file without "
            f"its index ('moov') was not finished: replace, repair or remove it.") from error


def _held(container: Any) -> str:
    return " and ".join(sorted({stream.type for stream in container.streams})) or "nothing"


def _check_size(path: str, width: int, height: int) -> None:
    if not width or not height:
        raise UserError(f"{path}: its video has no size; it is damaged or cut short: replace or remove it.")
    if width * height > MAX_FRAME_PIXELS:
        raise UserError(f"{path}: {width} x {height} pixels a frame, more than {MAX_FRAME_PIXELS}; make it smaller.")


def read_header(path: str, is_upright: bool) -> VideoHeader:
    """Read all packets without decoding them, and decode the first frame, whose size and rotation count.

    Frames that a cut left without their key frame are not counted: no decoder shows them.  Raises UserError naming
    ``path`` when it is no regular file, no video, cut short, or larger than ``MAX_FRAME_PIXELS`` a frame.
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
        _check_size(path, first.width, first.height)
        a, b, _, _ = matrix_of(first) if is_upright else UNTURNED
        width, height = (first.height, first.width) if abs(b) > abs(a) else (first.width, first.height)
        times = index.times[index.times >= min(first.pts, index.first_key_time)]
        return VideoHeader(width, height, stream.time_base, times, index.key_times, index.key_seeks,
                           index.last_duration, stream.duration or 0, stream.average_rate or Fraction(0), is_exact)


def before_all(stream: Any) -> int:
    """A time with which a seek finds the first packet, also where decoding begins before the first frame is shown."""
    return (stream.start_time or 0) - int(10 / stream.time_base)


@dataclass(frozen=True)
class _Index:
    """Frames of a stream, known without decoding them.  Fields as ``VideoHeader`` has them."""

    times: np.ndarray
    key_times: np.ndarray
    key_seeks: np.ndarray
    first_key_time: int
    """Of the first key frame of all, whether or not it is shown."""
    last_duration: int = 0


def _scan(path: str, container: Any, stream: Any) -> _Index:
    times: list[int] = []
    durations: dict[int, int] = {}
    key_seeks: dict[int, int] = {}
    first_key_time, num_packets = None, 0
    is_mpeg = container.format.name in _MPEG
    for packet in _heeded(path, container, stream):
        if packet.size == 0:
            continue
        num_packets += 1
        time = packet.dts if packet.pts is None else packet.pts
        if packet.is_corrupt or time is None:
            what = "is cut short or damaged" if packet.is_corrupt else "has a frame without a time"
            raise UserError(f"{path}: {what}, at frame {num_packets - 1}; replace, re-encode or remove the video.")
        if packet.is_keyframe and first_key_time is None:
            first_key_time = time
        if packet.is_discard:  # an edit list leaves it out
            continue
        times.append(time)
        durations[time] = packet.duration or 0
        if packet.is_keyframe:
            key_seeks[time] = packet.dts if is_mpeg and packet.dts is not None else time
    if not times:
        raise UserError(f"{path}: its video stream has no frame; replace or remove the video.")
    _check_whole(path, stream, num_packets, (max(times) - min(times)) * stream.time_base)
    ordered = np.unique(np.array(times, dtype=np.int64))
    begin = int(ordered[0])
    keys = np.array(sorted(key_seeks.items()) or [(begin, begin)], dtype=np.int64)
    return _Index(ordered, keys[:, 0], keys[:, 1], begin if first_key_time is None else first_key_time,
                  durations[int(ordered[-1])])


def _heeded(path: str, container: Any, stream: Any) -> Iterator[Any]:
    """All packets.  Raises UserError where a Matroska file is damaged between two: FFmpeg leaves out what it cannot
    read there, and says so only in its log.
    """
    packets = container.demux(stream)
    while True:
        with heard() as said:
            packet = next(packets, None)
        lost = [one for one in said if "matroska" in container.format.name and "ended prematurely" not in one]
        if lost:
            raise UserError(f"{path}: is damaged, and frames are lost ({lost[0]}); replace, re-encode or remove the "
                            f"video.")
        if packet is None:
            return
        yield packet


def _check_whole(path: str, stream: Any, num_packets: int, seconds: Fraction) -> None:
    """Refuse a file that says that it holds more than it does."""
    if num_packets < stream.frames:
        raise UserError(f"{path}: is cut short: it should have {stream.frames} frames and has {num_packets}; replace "
                        f"or remove the video.")
    if seconds > MAX_SECONDS:
        raise UserError(f"{path}: its frames lie {float(seconds):.0f} s apart, more than {MAX_SECONDS}; its times are "
                        f"damaged: re-encode or remove the video.")
    duration = _DURATION.fullmatch(stream.metadata.get("DURATION", ""))
    stated = sum(factor * float(one) for factor, one in zip((3600, 60, 1), duration.groups(), strict=True)) if (
        duration) else 0.0
    if seconds + 1 < 0.9 * stated:
        raise UserError(f"{path}: is cut short: it should last {stated:.1f} s and ends after {float(seconds):.1f} s; "
                        f"replace or remove the video.")


def _spread(path: str, container: Any, stream: Any) -> _Index:
    """The same of a large file, from its index and its last packets alone."""
    entries = stream.index_entries
    if stream.frames > MAX_FRAMES:
        raise UserError(f"{path}: it should have {stream.frames} frames, more than {MAX_FRAMES}; cut it into parts.")
    if len(entries) and entries[-1].pos + entries[-1].size > os.path.getsize(path):
        raise UserError(f"{path}: is cut short: its index names frames after its end; replace or remove the video.")
    first = stream.start_time or 0
    key_times = np.array([entry.timestamp for entry in entries if entry.is_keyframe] or [first], dtype=np.int64)
    container.seek(int(key_times.max()), stream=stream)
    last = max((packet.pts for packet in container.demux(stream) if packet.size and packet.pts is not None),
               default=first)
    times = np.linspace(first, last, stream.frames).round().astype(np.int64)
    return _Index(times, key_times, key_times, int(times[0]))


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Decoded frames with a time, from where the container stands."""
    for frame in container.decode(stream):
        frame.pts = frame.dts if frame.pts is None else frame.pts
        if frame.pts is not None:
            yield frame


Matrix = tuple[int, int, int, int]
"""How a file wants its frames to be turned: (x, y) goes to (a x + c y, b x + d y), as (a, b, c, d)."""
UNTURNED = (1, 0, 0, 1)


def matrix_of(frame: Any) -> Matrix:
    found = frame.side_data.get("DISPLAYMATRIX")
    if found is None:
        return UNTURNED
    a, b, _, c, d, *_ = np.frombuffer(bytes(found), dtype=np.int32).tolist()
    return a, b, c, d
