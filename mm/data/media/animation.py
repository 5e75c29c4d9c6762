"""Animated images (GIF, WebP, PNG) as videos: the time of each frame, and selected frames.  Pillow decodes them.

Frames are composited on white, as FFmpeg does for GIFs.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction

import numpy as np
from PIL import Image

from mm.data.media.image_decode import to_rgb
from mm.data.media.video_header import Pixels, VideoHeader, Wanted, check_size
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


def animation_frames(path: str, wanted: Wanted) -> Iterator[Pixels]:
    """The wanted frames, in order.  Raises UserError naming ``path`` for a damaged frame."""
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
