"""The cache of ViT outputs: with a frozen ViT, its features of images and videos are kept over epochs and runs.

``KEY[:2]/KEY.vit`` has one image or video: the rows of its patches as output by the ViT's last layer, and their crc32.
The key covers the content of the media file, everything that determines its pixels, and the ViT, so a stale file is
never used.  Data owners look features up here; ``mm.data.loader.feature_writer`` writes them.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mm.data.media.image_patches import ImagePlan
from mm.data.media.video_patches import VideoPlan, VideoProcessor
from mm.data.sample import Inline
from mm.environment import installed
from mm.errors import UserError
from mm.files import replace_file, sha256

_FORM = 3
"""Increment when the same settings would produce different pixels, features or files."""
CRC32_BYTES = 4
_PACKAGES = {"image": ("pillow", "simplejpeg", "torch"), "pyav": ("av", "pillow", "torch"),
             "decord": ("decord", "pillow", "torch"), "torchcodec": ("torchcodec", "pillow", "torch")}  # fmt: skip
"""Packages that decode each kind of file; another version may round differently."""


@dataclass(frozen=True)
class FeatureCache:
    """The cache folder, for the reader of the data.  Pickles into data workers."""

    directory: str
    vision: str
    """Fingerprint of the ViT: weights, settings and dtype."""
    row_bytes: int
    """Bytes of one patch's features."""

    def look_up(
        self, media: Sequence[ImagePlan | VideoPlan], videos: VideoProcessor
    ) -> tuple[tuple[str, ...], tuple[Tensor, ...] | None]:
        """The ``Microbatch.feature_keys`` of the media of one microbatch; or, if all are cached, their features.

        Raises UserError when a media file can no longer be read.
        """
        keys = [self.key(one, videos) for one in media]
        missing = {key for key in keys if not path_of(self.directory, key).exists()}
        if missing:
            return tuple(key if key in missing else "" for key in keys), None
        return (), tuple(read_features(self.directory, key, math.prod(one.grid), self.row_bytes)
                         for key, one in zip(keys, media, strict=True))

    def key(self, media: ImagePlan | VideoPlan, videos: VideoProcessor) -> str:
        """32 hexadecimal digits."""
        facts = [_FORM, self.vision, self.row_bytes, _content(media.path), pixel_facts(media, videos)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def pixel_facts(media: ImagePlan | VideoPlan, videos: VideoProcessor) -> dict[str, Any]:
    """Everything that determines the pixels besides the content of the file, as JSON values."""
    if isinstance(media, ImagePlan):
        return {"image": asdict(media.processor), "grid": media.grid, "versions": _versions("image")}
    backend, wanted = videos.backend, asdict(media.wanted)
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
    """Write ``rows``, which are on the host, atomically.  Raises OSError."""
    content: Any = rows.contiguous().view(torch.uint8).numpy()
    crc32 = zlib.crc32(content).to_bytes(CRC32_BYTES, "little")
    replace_file(path_of(directory, key), lambda stream: stream.writelines([content, crc32]))


def read_features(directory: str, key: str, num_rows: int, row_bytes: int) -> Tensor:
    """uint8 [num_rows, row_bytes].  Raises UserError if the file is damaged, has another size or cannot be read."""
    path = path_of(directory, key)
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise UserError(f"{path}: cannot read these cached ViT features: {error.strerror}.") from error
    content, crc32 = content[:-CRC32_BYTES], content[-CRC32_BYTES:]
    if len(content) != num_rows * row_bytes:
        raise UserError(f"{path}: these cached ViT features have {len(content)} bytes, not {num_rows * row_bytes}; "
                        f"delete the file.")
    if int.from_bytes(crc32.tobytes(), "little") != zlib.crc32(content.data):
        raise UserError(f"{path}: these cached ViT features do not match their checksum; delete the file.")
    return torch.from_numpy(content).view(num_rows, row_bytes)


def used_bytes(directory: str) -> int:
    """Size of all files in the folder, including partial ones left by a killed run."""
    total = 0
    for path in Path(directory).glob("*/*"):
        with suppress(FileNotFoundError):  # another rank's partial file, renamed in the meantime
            total += path.stat().st_size
    return total


def _content(path: str | Inline | tuple[str | Inline, ...]) -> str:
    """A hash of the content of a media file, of an embedded image, or of the frames of a listed video."""
    if isinstance(path, tuple):
        return hashlib.sha256(",".join(map(_content, path)).encode()).hexdigest()
    if isinstance(path, Inline):
        return path.digest
    try:
        with open(path, "rb") as stream:
            return sha256(stream)
    except OSError as error:
        raise UserError(f"{path}: can no longer be read: {error.strerror}.") from error


def _versions(kind: str) -> list[str | None]:
    return [installed(package) for package in _PACKAGES[kind]]
