"""``Sample``, the form of a training sample for all file formats; its lengths; and how messages name a bad one."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

import numpy as np

from mm.config.parse import shown


class Stored(Protocol):
    """Bytes that are read when they are needed, as those of an image in a Parquet file."""

    def read(self) -> bytes: ...


@dataclass(frozen=True)
class Inline:
    """An image embedded in its record."""

    name: str
    """How messages name it: the beginning of its data URL."""
    source: bytes | Stored = field(repr=False)

    @property
    def content(self) -> bytes:
        """The bytes of the image file.  Raises UserError when its file can no longer be read, or has changed."""
        return self.source if isinstance(self.source, bytes) else self.source.read()

    @property
    def digest(self) -> str:
        """SHA-256 of its bytes: identifies the image in caches and keys, wherever it is stored."""
        return hashlib.sha256(self.content).hexdigest()

    def __str__(self) -> str:
        return self.name


class _AnyMedia:
    """Where an image or video comes from."""

    path: Any

    @property
    def contents(self) -> tuple[str | Inline, ...]:
        """All of its files or embedded images; a video given as a list of frames has several."""
        return self.path if isinstance(self.path, tuple) else (self.path,)

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of those stored as files, without embedded ones."""
        return tuple(one for one in self.contents if isinstance(one, str))


@dataclass(frozen=True)
class Image(_AnyMedia):
    """An image.  Its own pixel bounds override those of the data JSON."""

    kind: ClassVar[str] = "image"
    placeholder: ClassVar[str] = "<image>"
    """Marks its place in a text."""
    path: str | Inline
    """A path exists on this machine."""
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True)
class Video(_AnyMedia):
    """A video.  Its own settings override those of the data JSON; field names follow qwen-vl-utils."""

    kind: ClassVar[str] = "video"
    placeholder: ClassVar[str] = "<video>"
    path: str | tuple[str | Inline, ...]
    """A file, or its frames as images; all listed frames are used."""
    fps: float | None = None
    """Frames sampled per second; not together with ``nframes``.  For listed frames, the same as ``sample_fps``."""
    sample_fps: float | None = None
    """For listed frames: frames per second of video time."""
    raw_fps: float | None = None
    """For listed frames: frame rate of the original video.  Accepted but unused: the model has no use for it."""
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    """Per frame, like ``max_pixels``."""
    max_pixels: int | None = None
    total_pixels: int | None = None
    """Total over all frames."""
    video_start: float | None = None
    """In seconds from the beginning, like ``video_end``.  Frames outside this range are ignored."""
    video_end: float | None = None


Media = Image | Video
KINDS: Mapping[str, type[Media]] = {one.kind: one for one in (Image, Video)}


@dataclass(frozen=True)
class Turn:
    """One message.  ``role`` is "system", "user" or "assistant"; only user turns contain images and videos."""

    role: str
    content: tuple[str | Media, ...]

    @property
    def text(self) -> str:
        """Its text, with a placeholder for each image and video."""
        return "".join(item if isinstance(item, str) else item.placeholder for item in self.content)

    @property
    def media(self) -> tuple[Media, ...]:
        """In reading order."""
        return tuple(item for item in self.content if not isinstance(item, str))


@dataclass(frozen=True)
class Sample:
    """An optional system message, then alternating user and assistant turns, ending with an assistant turn."""

    turns: tuple[Turn, ...]
    where: str
    """Its record for messages, as ``record_place`` names it."""

    @property
    def media(self) -> tuple[Media, ...]:
        """In reading order."""
        return tuple(item for turn in self.turns for item in turn.media)


class HasLengths(Protocol):
    """The lengths of the samples of a dataset, perhaps on disk; ``of`` loads those of some samples."""

    def __len__(self) -> int: ...

    def of(self, numbers: np.ndarray) -> "Lengths": ...


@dataclass(frozen=True)
class Lengths:
    """One entry per sample, in dataset order, after truncation to ``--seq-length``."""

    num_tokens: np.ndarray
    """int32 [num_samples], including visual tokens."""
    num_target_tokens: np.ndarray
    """int32"""
    num_media: np.ndarray
    """int32: images and videos."""
    num_patches: np.ndarray
    """int32: total over all images and videos."""
    num_image_pairs: np.ndarray
    """int64: pairs of patches in full-attention layers of the ViT, counted by ``mm.batch.image_pairs``."""
    num_window_pairs: np.ndarray
    """int64: the same in window-attention layers, counted by ``mm.batch.window_pairs``."""

    def __len__(self) -> int:
        return len(self.num_tokens)

    def of(self, numbers: np.ndarray) -> "Lengths":
        return Lengths(*(getattr(self, one.name)[numbers] for one in fields(self)))


_ID_CHARACTERS = 80
"""Longer ids are shortened in messages."""


@dataclass(frozen=True)
class BadSample:
    """A record that cannot be used.  Its fields are one line of ``quarantine.jsonl``."""

    dataset: str
    """Path of its file."""
    line: int | None
    """Its line in the file, counted from 1; None if the file has no lines."""
    index: int
    """Its index in the file, counted from 0."""
    id: str | int | None
    """Its own ``id`` field, if any."""
    path: str | None
    """The image or video that causes the problem, if any."""
    reason: str

    @property
    def where(self) -> str:
        return self.dataset if self.line is None else f"{self.dataset}:{self.line}"

    @property
    def what(self) -> str:
        return f"{numbered('record', self.index, self.id)}: {self.reason}"

    def message(self) -> str:
        return f"{self.where}: {self.what}"


def numbered(what: str, index: int, name: str | int | None = None) -> str:
    """``what``, its index and its ``name``: a line may contain a whole list, so its number does not identify a record.
    """
    called = "" if name is None else f", id {_short(name)}"
    return f"{what} {index} (counted from 0{called})"


def record_place(path: str, index: int, name: str | int | None = None) -> str:
    """The place of a record whose line is unknown.  The form ``path:N`` is reserved for line numbers."""
    return f"{path}: record {index}" + ("" if name is None else f" (id {_short(name)})")


def name_of(record: Any) -> str | int | None:
    """The ``id`` of a record, or None."""
    name = record.get("id") if isinstance(record, dict) else None
    return name if isinstance(name, str | int) else None


def described(value: Any) -> str:
    """What a value is, without the text in it: samples may be private, and messages go to logs."""
    match value:
        case str() if value:
            return f"a string of {len(value)} characters"
        case list() if value:
            return f"a list of {len(value)}"
        case dict() if value:
            return f"an object with the keys {shown(list(value))}"
        case _:
            return shown(value)


def _short(name: str | int) -> str:
    """An id for messages: ``repr`` escapes control characters and lone surrogates."""
    text = repr(name)
    return text if len(text) <= _ID_CHARACTERS else f"{text[: _ID_CHARACTERS - 3]}..."
