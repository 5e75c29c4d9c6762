"""Video files: what they hold, and chosen frames of them.  Runs in a process of its own, which can be killed.

Which frames are chosen, and what becomes of them, is not known here.  Nothing here loads torch, but for torchcodec.
"""

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from typing import Any

import av
import numpy as np
from av.error import FFmpegError

from mm.errors import UserError

MAX_FRAME_PIXELS = 50_000_000
"""Of one frame, as of a picture; 8K has 33 million."""
MAX_SCANNED_BYTES = 1 << 30
"""The packets of a larger file are not all read, where its index says how many frames there are."""
MAX_FRAMES = 20_000_000
"""A week at 30 a second, about."""
MAX_SECONDS = 30 * 24 * 3600
"""Between the first frame and the last one; damaged times can be any number."""
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
    reach: int
    """How much earlier the frame may begin that is found there."""
    time_base: Fraction
    is_upright: bool


Pixels = np.ndarray
"""uint8 [height, width, 3], red, green and blue."""


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[Any, Any]]:
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

    Raises UserError naming ``path`` when it is no regular file, no video, cut short, or larger than
    ``MAX_FRAME_PIXELS`` a frame.
    """
    with _opened(path) as (container, stream):
        is_exact = not stream.frames or os.path.getsize(path) <= MAX_SCANNED_BYTES
        times, key_times, last_duration = (_scan if is_exact else _spread)(path, container, stream)
        container.seek(int(key_times[0]), stream=stream)
        first = next(_frames(path, container, stream), None)
        if first is None:
            raise UserError(f"{path}: has no frame that can be decoded; replace or remove the video.")
        _check_size(path, first.width, first.height)
        a, b, _, _ = _matrix(first) if is_upright else _UNTURNED
        width, height = (first.height, first.width) if abs(b) > abs(a) else (first.width, first.height)
        return VideoHeader(width, height, stream.time_base, times, key_times, last_duration, stream.duration or 0,
                           stream.average_rate or Fraction(0), is_exact)


def _scan(path: str, container: Any, stream: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Times of all frames, times of key frames, and the last duration."""
    times, key_times, durations, num_packets = [], [], {}, 0
    for packet in container.demux(stream):
        if packet.size == 0:
            continue
        num_packets += 1
        time = packet.dts if packet.pts is None else packet.pts
        if packet.is_corrupt or time is None:
            what = "is cut short or damaged" if packet.is_corrupt else "has a frame without a time"
            raise UserError(f"{path}: {what}, at frame {num_packets - 1}; replace, re-encode or remove the video.")
        if packet.is_discard:  # an edit list leaves it out
            continue
        times.append(time)
        durations[time] = packet.duration or 0
        if packet.is_keyframe:
            key_times.append(time)
    if not times:
        raise UserError(f"{path}: its video stream has no frame; replace or remove the video.")
    _check_whole(path, stream, num_packets, (max(times) - min(times)) * stream.time_base)
    ordered = np.unique(np.array(times, dtype=np.int64))
    return ordered, np.unique(np.array(key_times or [ordered[0]], dtype=np.int64)), durations[int(ordered[-1])]


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


def _spread(path: str, container: Any, stream: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """The same of a large file, from its index and its last packets alone."""
    entries = stream.index_entries
    if stream.frames > MAX_FRAMES:
        raise UserError(f"{path}: it should have {stream.frames} frames, more than {MAX_FRAMES}; cut it into parts.")
    if len(entries) and entries[-1].pos + entries[-1].size > os.path.getsize(path):
        raise UserError(f"{path}: is cut short: its index names frames after its end; replace or remove the video.")
    key_times = [entry.timestamp for entry in entries if entry.is_keyframe]
    first = stream.start_time or 0
    container.seek(max(key_times, default=first), stream=stream)
    last = max((packet.pts for packet in container.demux(stream) if packet.size and packet.pts is not None),
               default=first)
    times = np.linspace(first, last, stream.frames).round().astype(np.int64)
    return times, np.array(key_times or [first], dtype=np.int64), 0


def _frames(path: str, container: Any, stream: Any) -> Iterator[Any]:
    """Decoded frames with a time, from where the container stands."""
    for frame in container.decode(stream):
        frame.pts = frame.dts if frame.pts is None else frame.pts
        if frame.pts is not None:
            yield frame


def pyav_frames(path: str, wanted: Wanted) -> Iterator[Pixels]:
    """The wanted frames by PyAV, one at a time; only they are converted to RGB.

    Between two that are far apart it goes on at a key frame.  Raises UserError naming the file and the second at which
    a frame is missing or damaged.
    """
    with _opened(path) as (container, stream):
        frames, current, following = _sought(path, container, stream, wanted, 0)
        # Asked of one frame only: PyAV keeps each one that was asked for what lies beside it.
        matrix = _matrix(following) if wanted.is_upright and following is not None else _UNTURNED
        for number, time in enumerate(wanted.times):
            if following is not None and following.pts < wanted.starts[number] - wanted.reach:
                frames, current, following = _sought(path, container, stream, wanted, number)
            while following is not None and following.pts <= time:
                current, following = following, next(frames, None)
            if current is None or time - current.pts > wanted.reach or current.is_corrupt:
                raise UserError(f"{path}: {_missing(time, wanted.time_base)}.")
            yield _turned(current.to_ndarray(format="rgb24"), matrix)


def _sought(path: str, container: Any, stream: Any, wanted: Wanted, number: int) -> tuple[Iterator[Any], None, Any]:
    """The frames from a key frame on that is not after the wanted one, and the first of them.

    A seek can land too late: an index may hold decoding times, and MPEG streams have none.  The key frame before it
    serves then, and at last the beginning.
    """
    frames, first = iter(()), None
    beginning = (stream.start_time or 0) - int(10 / stream.time_base)
    for start in sorted({beginning, *wanted.starts[: number + 1]}, reverse=True):
        container.seek(start, stream=stream)
        frames = _frames(path, container, stream)
        first = next(frames, None)
        if first is not None and first.pts <= wanted.times[number]:
            break
    return frames, None, first


Matrix = tuple[int, int, int, int]
"""How a file wants its frames to be turned: (x, y) goes to (a x + c y, b x + d y), as (a, b, c, d)."""
_UNTURNED = (1, 0, 0, 1)


def _matrix(frame: Any) -> Matrix:
    found = frame.side_data.get("DISPLAYMATRIX")
    if found is None:
        return _UNTURNED
    a, b, _, c, d, *_ = np.frombuffer(bytes(found), dtype=np.int32).tolist()
    return a, b, c, d


def _turned(pixels: Pixels, matrix: Matrix) -> Pixels:
    """A frame turned by quarters of a circle and mirrored."""
    a, b, c, d = matrix
    if abs(b) > abs(a):
        pixels, a, d = pixels.transpose(1, 0, 2), c, b
    return np.ascontiguousarray(pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1])


def decord_frames(path: str, wanted: Wanted) -> Iterator[Pixels]:
    """The wanted frames by decord.  A file that turns its frames by quarters is refused: their rows come damaged."""
    decord: Any = import_module("decord")
    a, b, _, d = _first_matrix(path)
    if abs(b) > abs(a) or (not wanted.is_upright and (a < 0 or d < 0)):
        raise UserError(f"{path}: is turned by its metadata, which decord gets wrong; set video_backend to \"pyav\".")
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


def torchcodec_frames(path: str, wanted: Wanted) -> Iterator[Pixels]:
    """The wanted frames by torchcodec, which always turns them upright."""
    decoders: Any = import_module("torchcodec.decoders")
    if not wanted.is_upright and _first_matrix(path) != _UNTURNED:
        raise UserError(f"{path}: is turned by its metadata, which torchcodec always obeys and \"image_resize\": "
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


def _first_matrix(path: str) -> Matrix:
    with _opened(path) as (container, stream):
        frame = next(_frames(path, container, stream), None)
        return _UNTURNED if frame is None else _matrix(frame)


def _check_time(path: str, seconds: float, time: int, wanted: Wanted) -> None:
    """Refuse a frame that begins at ``seconds`` where another is wanted; decord has seconds in single precision."""
    if abs(seconds - float(time * wanted.time_base)) > 0.002 + float(wanted.reach * wanted.time_base):
        raise UserError(f"{path}: {_missing(time, wanted.time_base)}.")


def _missing(time: int, time_base: Fraction) -> str:
    return (f"the frame at {float(time * time_base):.2f} s is missing or damaged; replace, re-encode or remove the "
            f"video")


BACKENDS: dict[str, Callable[[str, Wanted], Iterator[Pixels]]] = {
    "pyav": pyav_frames, "decord": decord_frames, "torchcodec": torchcodec_frames}


def missing_backend(name: str) -> str | None:
    """Why a backend cannot be used here, or None."""
    try:
        import_module({"pyav": "av", "decord": "decord", "torchcodec": "torchcodec.decoders"}[name])
    except Exception as error:  # a library that does not find its own libraries raises many types
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None
