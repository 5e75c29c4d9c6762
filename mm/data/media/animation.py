"""Animated pictures (GIF, WebP, PNG) as videos: when each frame begins, and chosen ones.  Pillow reads them.

A frame is shown on white, as FFmpeg shows a GIF.  Which frames are chosen is not known here.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
from PIL import Image

from mm.data.media.picture import MAX_IMAGE_PIXELS, to_rgb
from mm.data.media.video_file import Pixels, VideoHeader, Wanted
from mm.errors import UserError

MAX_FRAMES = 100_000
_FORMATS = ("GIF", "WEBP", "PNG")
_BASE = Fraction(1, 1000)
_USUAL_MS = 100
"""How long a frame is shown whose file gives no time, or, in a GIF, less than 20 ms: so do FFmpeg and browsers."""
_LEAST_GIF_MS = 20


def is_animation(path: str) -> bool:
    """Whether the first bytes are those of an animated picture; a GIF is one also with a single frame.

    Only a regular file is opened: opening a pipe would wait for somebody to write to it.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False  # who opens it as a video says what it is
        with open(path, "rb") as file:
            start = file.read(1 << 16)
    except OSError:
        return False  # who opens it as a video says why
    if start[:4] == b"GIF8":
        return True
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return b"ANIM" in start[12:64]
    return start[:8] == b"\x89PNG\r\n\x1a\n" and b"acTL" in start.split(b"IDAT", 1)[0]


def animation_header(path: str) -> VideoHeader:
    """Raises UserError naming ``path`` when it is cut short, damaged or too large."""
    with _opened(path) as image:
        if image.width * image.height > MAX_IMAGE_PIXELS:
            raise UserError(f"{path}: {image.width} x {image.height} pixels a frame, more than {MAX_IMAGE_PIXELS}; "
                            f"make it smaller.")
        times, begin, shown = [], 0.0, 0.0
        for shown in _durations(path, image):
            times.append(round(begin))
            begin += shown
    ticks = np.array(times, dtype=np.int64)
    return VideoHeader(image.width, image.height, _BASE, ticks, ticks, ticks, round(shown), round(begin))


def animation_frames(path: str, wanted: Wanted) -> Iterator[Pixels]:
    """The wanted frames, one after another; raises UserError naming ``path`` for one that is damaged."""
    with _opened(path) as image:
        first = _num_hidden(image)
        for number in wanted.numbers:
            image.seek(first + number)
            yield np.array(to_rgb(image))


def _durations(path: str, image: Image.Image) -> Iterator[float]:
    """The duration of each frame in milliseconds."""
    first, num_frames = _num_hidden(image), getattr(image, "n_frames", 1)
    if num_frames - first > MAX_FRAMES:
        raise UserError(f"{path}: has {num_frames} frames, more than {MAX_FRAMES}; cut it into parts.")
    if image.format == "GIF":
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 1024))
            if file.read().rstrip(b"\0\r\n ")[-1:] != b";":
                raise UserError(f"{path}: is cut short: the GIF does not end with its trailer; replace, re-encode or "
                                f"remove it.")
    of_webp = _webp_durations(path) if image.format == "WEBP" else None
    for number in range(first, num_frames):
        if of_webp is None:
            image.seek(number)
        shown = float(image.info.get("duration", 0)) if of_webp is None else of_webp[number]
        yield shown if shown >= (_LEAST_GIF_MS if image.format == "GIF" else 1) else _USUAL_MS


def _webp_durations(path: str) -> list[int]:
    """The duration of each frame in milliseconds; Pillow would decode all frames to know them."""
    found: list[int] = []
    with open(path, "rb") as file:
        file.seek(12)  # behind "RIFF", its size and "WEBP"
        while len(head := file.read(8)) == 8:
            start, num_bytes = file.tell(), int.from_bytes(head[4:], "little")
            if head[:4] == b"ANMF":
                found.append(int.from_bytes(file.read(15)[12:], "little"))  # behind place and size of the frame
            file.seek(start + num_bytes + num_bytes % 2)
    return found


def _num_hidden(image: Image.Image) -> int:
    """Frames before the first one: a PNG can have a picture for viewers that know no animations."""
    return 1 if image.info.get("default_image") else 0


@contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    try:
        with Image.open(path, formats=_FORMATS) as image:
            yield image
    except UserError:
        raise
    except Exception as error:  # Pillow's decoders raise errors of many types on broken files
        raise UserError(f"{path}: the animated picture is damaged or cut short ({error}); replace, re-encode or remove "
                        f"it.") from error
