"""The one form of a sample inside, whatever file format it was read from: turns of text, pictures and videos.

Which formats there are, and what becomes of a sample, is not known here.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Inline:
    """The file of a picture, where the record itself holds it.  A kind of its own may read ``content`` when it is
    asked for (``mm.data.read.parquet``)."""

    name: str
    """What messages call it: the beginning of its address."""
    content: bytes = field(repr=False)

    @property
    def digest(self) -> str:
        """A digest of its bytes, wherever they stand: the name of the picture in caches and keys."""
        return hashlib.sha256(self.content).hexdigest()

    def __str__(self) -> str:
        return self.name


class _Shown:
    """What pictures and videos have in common."""

    path: Any

    @property
    def contents(self) -> tuple[str | Inline, ...]:
        """Each file that it is made of: a video that is given as a list of pictures has several."""
        return self.path if isinstance(self.path, tuple) else (self.path,)

    @property
    def files(self) -> tuple[str, ...]:
        """Those that are on this machine."""
        return tuple(one for one in self.contents if isinstance(one, str))


@dataclass(frozen=True)
class Image(_Shown):
    """A picture.  Bounds of its own, in pixels, take the place of those of the data JSON."""

    kind: ClassVar[str] = "image"
    placeholder: ClassVar[str] = "<image>"
    """Marks its place in a text."""
    path: str | Inline
    """It exists on this machine."""
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True)
class Video(_Shown):
    """A video.  Settings of its own take the place of those of the data JSON; they are named as qwen-vl-utils does."""

    kind: ClassVar[str] = "video"
    placeholder: ClassVar[str] = "<video>"
    path: str | tuple[str | Inline, ...]
    """A file, or its frames as pictures, of which every one is taken."""
    fps: float | None = None
    """Frames to take of a second; not together with ``nframes``.  Of listed frames, the same as ``sample_fps``."""
    sample_fps: float | None = None
    """Of listed frames: how many are a second of the video."""
    raw_fps: float | None = None
    """Of listed frames: how many a second had before these were chosen.  Qwen2.5-VL makes nothing of it."""
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    """Of a frame, like ``max_pixels``."""
    max_pixels: int | None = None
    total_pixels: int | None = None
    """Pixels of all frames together."""
    video_start: float | None = None
    """Seconds from the beginning, like ``video_end``: what lies outside is not looked at."""
    video_end: float | None = None


Media = Image | Video
KINDS: Mapping[str, type[Media]] = {one.kind: one for one in (Image, Video)}


@dataclass(frozen=True)
class Turn:
    """What one side says.  ``role`` is "system", "user" or "assistant"; only a user shows pictures and videos."""

    role: str
    parts: tuple[str | Media, ...]

    @property
    def text(self) -> str:
        """Its words, with a placeholder for each picture and video."""
        return "".join(part if isinstance(part, str) else part.placeholder for part in self.parts)

    @property
    def media(self) -> tuple[Media, ...]:
        """In reading order."""
        return tuple(part for part in self.parts if not isinstance(part, str))


@dataclass(frozen=True)
class Sample:
    """An optional system message, then user and assistant turns in alternation, ending with an assistant's."""

    turns: tuple[Turn, ...]
    source: str
    """``file:index``, the index counted from 0 within the file."""

    @property
    def media(self) -> tuple[Media, ...]:
        """In reading order."""
        return tuple(part for turn in self.turns for part in turn.media)
