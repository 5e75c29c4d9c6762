"""Animated images (GIF, WebP, PNG) as videos: the time of each frame, and selected frames.  Pillow decodes them.

Frames are composited on white, as FFmpeg does for GIFs.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
from PIL import Image

from mm.data.media.picture import to_rgb
from mm.data.media.video_file import Pixels, VideoHeader, Wanted, check_size
from mm.errors import UserError

MAX_FRAMES = 100_000
_FORMATS = ("GIF", "WEBP", "PNG")
_BASE = Fraction(1, 1000)
_USUAL_MS = 100
"""Duration of a frame that states none, or of a GIF frame below 20 ms.  FFmpeg and browsers do the same."""
_LEAST_GIF_MS = 20


def is_animation(path: str) -> bool:
    """Whether the file starts like an animated image.  A GIF counts even with a single frame.

    Only regular files are opened: opening a pipe would block until someone writes to it.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False  # opening it as a video reports what it is
        with open(path, "rb") as file:
            start = file.read(1 << 16)
    except OSError:
        return False  # opening it as a video reports the error
    if start[:4] == b"GIF8":
        return True
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return b"ANIM" in start[12:64]
    return start[:8] == b"\x89PNG\r\n\x1a\n" and b"acTL" in start.split(b"IDAT", 1)[0]


def animation_header(path: str) -> VideoHeader:
    """Raises UserError naming ``path`` when it is truncated, damaged or too large."""
    with _opened(path) as image:
        check_size(path, image.width, image.height)
        times, begin, shown = [], 0.0, 0.0
        for shown in _durations(path, image):
            times.append(round(begin))
            begin += shown
    ticks = np.array(times, dtype=np.int64)
    return VideoHeader(image.width, image.height, _BASE, ticks, ticks, ticks, round(shown), round(begin))


def animation_frames(path: str, wanted: Wanted) -> Iterator[Pixels]:
    """The wanted frames, in order.  Raises UserError naming ``path`` for a damaged frame."""
    with _opened(path) as image:
        first = _num_hidden(image)
        for number in wanted.numbers:
            image.seek(first + number)
            yield np.array(to_rgb(image))


def _durations(path: str, image: Image.Image) -> Iterator[float]:
    """The duration of each frame in milliseconds."""
    first, num_frames = _num_hidden(image), getattr(image, "n_frames", 1)
    if num_frames - first > MAX_FRAMES:
        raise UserError(f"{path}: has {num_frames} frames, above the limit of {MAX_FRAMES}; split it.")
    if image.format == "GIF":
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 1024))
            if file.read().rstrip(b"\0\r\n ")[-1:] != b";":
                raise UserError(f"{path}: is truncated: the GIF does not end with its trailer; replace, re-encode or "
                                f"remove it.")
    of_webp = _webp_durations(path) if image.format == "WEBP" else None
    for number in range(first, num_frames):
        if of_webp is None:
            image.seek(number)
        shown = float(image.info.get("duration", 0)) if of_webp is None else of_webp[number]
        yield shown if shown >= (_LEAST_GIF_MS if image.format == "GIF" else 1) else _USUAL_MS


def _webp_durations(path: str) -> list[int]:
    """The duration of each frame in milliseconds.  Pillow would decode all frames to find them."""
    found: list[int] = []
    with open(path, "rb") as file:
        file.seek(12)  # after "RIFF", its size and "WEBP"
        while len(head := file.read(8)) == 8:
            start, num_bytes = file.tell(), int.from_bytes(head[4:], "little")
            if head[:4] == b"ANMF":
                found.append(int.from_bytes(file.read(15)[12:], "little"))  # after position and size of the frame
            file.seek(start + num_bytes + num_bytes % 2)
    return found


def _num_hidden(image: Image.Image) -> int:
    """Number of hidden frames before the first: a PNG may contain an image for viewers without animation support."""
    return 1 if image.info.get("default_image") else 0


@contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    try:
        with Image.open(path, formats=_FORMATS) as image:
            yield image
    except UserError:
        raise
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise many error types on broken files
        raise UserError(f"{path}: the animated image is damaged or truncated ({error}); replace, re-encode or remove "
                        f"it.") from error
