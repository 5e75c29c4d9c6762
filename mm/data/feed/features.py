"""What a frozen ViT has made of pictures and videos, kept in a folder over epochs and runs.

``KEY[:2]/KEY.vit`` holds one picture or video: a head of 64 bytes (``_HEAD``) and then the rows of its patches, in the
processor's order, as the ViT's last layer gave them.  The key is of the content of the media file, of everything that
decides which pixels are made of it, and of the ViT, so that another one is never taken.  The rank that reads the data
looks things up here; who computes and writes them is not known here.
"""

import hashlib
import json
import math
import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm.data.encode.encoder import ImagePlan
from mm.data.media.video import VideoPlan, VideoProcessor
from mm.data.sample import Inline
from mm.errors import UserError
from mm.files import replace_file

_FORM = 1
"""Goes up when the same settings would make other pixels or features."""
_HEAD = struct.Struct("<8s16sIIQ24x")
"""Little-endian: ``_MAGIC``, the key, crc32 of the rows, bytes of a row, number of rows, zeros."""
_MAGIC = b"MM-ViT 1"
HEAD_BYTES = _HEAD.size
_PACKAGES = {"image": ("pillow", "simplejpeg", "torch"), "pyav": ("av", "pillow", "torch"),
             "decord": ("decord", "pillow", "torch"), "torchcodec": ("torchcodec", "pillow", "torch")}  # fmt: skip
"""What makes pixels of each kind of file: another version may round otherwise."""


@dataclass(frozen=True)
class Found:
    """What the folder holds of the media of one microbatch."""

    keys: tuple[str, ...]
    """Of each picture or video; "" where it is there already.  () where all are there."""
    features: tuple[Tensor, ...] | None
    """uint8 [num_patches, row_bytes] of each, where all are there."""
    notes: list[str]
    """What was wrong with files."""


@dataclass(frozen=True)
class FeatureCache:
    """The folder, as the reader of the data sees it.  Pickles into data workers."""

    directory: str
    vision: str
    """Fingerprint of the ViT: its weights, settings and dtype."""
    row_bytes: int
    """Bytes of one patch's features."""

    def look_up(self, media: Sequence[ImagePlan | VideoPlan], videos: VideoProcessor) -> Found:
        """What is there of ``media``.  A file that is damaged is told, deleted, and counts as absent.

        Raises UserError when a media file can no longer be read.
        """
        keys = [self.key(one, videos) for one in media]
        notes: list[str] = []
        missing = {key for key in keys if not path_of(self.directory, key).exists()}
        features: dict[str, Tensor] = {}
        num_patches = {key: math.prod(one.grid) for key, one in zip(keys, media, strict=True)}
        for key, count in num_patches.items() if not missing else ():
            try:
                features[key] = read_features(self.directory, key, count, self.row_bytes)
            except UserError as error:
                missing.add(key)
                notes += [f"{problem} {self._delete(key)}" for problem in error.problems]
        if missing:
            return Found(tuple(key if key in missing else "" for key in keys), None, notes)
        return Found((), tuple(features[key] for key in keys), notes)

    def key(self, media: ImagePlan | VideoPlan, videos: VideoProcessor) -> str:
        """32 hexadecimal digits."""
        facts = [_FORM, self.vision, self.row_bytes, _content(media.path), pixel_facts(media, videos)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def _delete(self, key: str) -> str:
        try:
            path_of(self.directory, key).unlink(missing_ok=True)
        except OSError as error:
            return f"It cannot be deleted ({error.strerror}), so its picture or video is computed in every epoch."
        return "It is deleted, and made again."


def pixel_facts(media: ImagePlan | VideoPlan, videos: VideoProcessor) -> dict[str, Any]:
    """Everything beside the content of the file that decides its pixels, as JSON values."""
    if isinstance(media, ImagePlan):
        return {"image": asdict(media.processor), "grid": media.grid, "versions": _versions("image")}
    backend, wanted = videos.decoder.backend, asdict(media.wanted)
    return {
        "video": asdict(videos.constants),
        "grid": media.grid,
        "frames": wanted | {"time_base": str(media.wanted.time_base)},
        "repeats": media.repeats,
        "steps": media.steps,
        "backend": backend,
        "versions": _versions(backend),
    }


def path_of(directory: str, key: str) -> Path:
    return Path(directory) / key[:2] / f"{key}.vit"


def write_features(directory: str, key: str, rows: Tensor) -> None:
    """Keep ``rows``, which are on the host, whole or not at all.  Raises OSError."""
    content: Any = rows.contiguous().view(torch.uint8).numpy()
    head = _HEAD.pack(_MAGIC, bytes.fromhex(key), zlib.crc32(content), content.shape[1], len(content))
    replace_file(path_of(directory, key), lambda stream: (stream.write(head), stream.write(content)))


def read_features(directory: str, key: str, num_rows: int, row_bytes: int) -> Tensor:
    """uint8 [num_rows, row_bytes].  Raises UserError for a file that is not what was written under this key."""
    path, rows = path_of(directory, key), torch.empty(num_rows, row_bytes, dtype=torch.uint8)
    content: Any = rows.numpy()
    try:
        with path.open("rb", buffering=0) as stream:
            head, size = stream.read(_HEAD.size), os.fstat(stream.fileno()).st_size
            has_all = size == _HEAD.size + rows.nbytes and stream.readinto(content) == rows.nbytes
    except OSError as error:
        raise UserError(f"{path}: what is kept of the ViT's work cannot be read: {error.strerror}.") from error
    if not has_all:
        raise UserError(f"{path}: what is kept of the ViT's work has {size} bytes, not {_HEAD.size + rows.nbytes}.")
    if head != _HEAD.pack(_MAGIC, bytes.fromhex(key), zlib.crc32(content), row_bytes, num_rows):
        raise UserError(f"{path}: what is kept of the ViT's work is damaged: its head does not fit its rows.")
    return rows


def used_bytes(directory: str) -> int:
    """The size of everything that is kept in a folder, and of what a run has left half when it was killed."""
    total = 0
    for path in Path(directory).glob("*/*"):
        with suppress(FileNotFoundError):  # deleted meanwhile: it was damaged
            total += path.stat().st_size
    return total


def _content(path: str | Inline | tuple[str | Inline, ...]) -> str:
    """Of the bytes of a media file, which a record may hold itself, or of the pictures that are a video's frames."""
    if isinstance(path, tuple):
        return hashlib.sha256(",".join(map(_content, path)).encode()).hexdigest()
    if isinstance(path, Inline):
        return path.digest
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: can no longer be read: {error.strerror}.") from error


def _versions(kind: str) -> list[str | None]:
    return [_version(package) for package in _PACKAGES[kind]]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # a build of one's own
        return None
