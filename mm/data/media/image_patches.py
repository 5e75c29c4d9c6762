"""Image files as the patches that the ViT reads, before normalisation.

The default is bit-identical to transformers' ``Qwen2VLImageProcessorPil``, and faster.  ``backend="torch"`` resizes
with torch, as transformers' torchvision-based processor does, and is faster still.  LLaMA-Factory's rule, which
MindSpeed-MM uses, resizes the image once before that.
"""

import json
import math
import operator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated
from torch import Tensor
from torch.nn.functional import interpolate

from mm.batch import Grid, Normalisation
from mm.config.data import ImageBackend, ResizeRule
from mm.config.parse import Count, NotNegative, Positive, expected, fields_of, read_json
from mm.data.media.image_decode import image_size, load_image, load_pixels
from mm.data.sample import Image as ImageItem
from mm.data.sample import Inline
from mm.data.workers import decoding
from mm.errors import UserError, refuse

ResizeStep = tuple[tuple[int, int], Image.Resampling]
"""A size (width, height) to resize to, and the filter to use."""

_CONFIG_FILES = {
    "image": ("processor_config.json", "preprocessor_config.json"),
    "video": ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"),
}  # fmt: skip
"""Files that may hold the settings of each kind, in transformers' order.  The first one holds both kinds."""


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: float) -> tuple[int, int]:
    """The size (height, width) an image is resized to: multiples of ``factor``, with the area within the bounds.

    transformers' function of this name, whose module takes seconds to import.  Raises ValueError when one side is more
    than 200 times the other.
    """
    if max(height, width) / min(height, width) > 200:
        raise ValueError(f"one side is more than 200 times the other: {width} x {height} pixels")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def llama_factory_steps(width: int, height: int, min_pixels: int, max_pixels: int) -> list[ResizeStep]:
    """The resizing that LLaMA-Factory does before transformers' processor (its ``_preprocess_image``).

    The area is brought within the bounds, a side below 28 becomes 28, and an aspect ratio above 200 becomes 180.
    Raises ValueError when a side would become 0.
    """
    steps: list[ResizeStep] = []
    for bound, is_outside in ((max_pixels, operator.gt), (min_pixels, operator.lt)):
        if is_outside(width * height, bound):
            factor = math.sqrt(bound / (width * height))
            width, height = int(width * factor), int(height * factor)
            if 0 in (width, height):
                raise ValueError(f"resizing it to {bound} pixels leaves a side of 0 pixels")
            steps.append(((width, height), Image.Resampling.NEAREST))
    if min(width, height) < 28:
        width, height = max(width, 28), max(height, 28)
        steps.append(((width, height), Image.Resampling.BICUBIC))
    if max(width, height) / min(width, height) > 200:
        width, height = min(width, height * 180), min(height, width * 180)
        steps.append(((width, height), Image.Resampling.BICUBIC))
    return steps


_PerChannel = Annotated[tuple[NotNegative, NotNegative, NotNegative], Field(title="three numbers")]
_PositivePerChannel = Annotated[tuple[Positive, Positive, Positive], Field(title="three numbers above 0")]


@validated(frozen=True, config=ConfigDict(strict=True))
class ImageProcessor:
    """Sizes and constants for images, with their names in Hugging Face's files."""

    min_pixels: Count
    max_pixels: Count
    patch_size: Count
    temporal_patch_size: Count
    merge_size: Count
    image_mean: _PerChannel
    image_std: _PositivePerChannel
    is_upright: bool = True
    """Whether to apply the EXIF orientation."""
    llama_factory: tuple[int, int] | None = None
    """Least and most pixels of LLaMA-Factory's rule; None: that rule is not used."""
    backend: ImageBackend = "pillow"
    """The library that resizes."""

    @classmethod
    def from_directory(
        cls, directory: str, min_pixels: int = 0, max_pixels: int = 0, rule: ResizeRule = "transformers",
        is_upright: bool = True, backend: ImageBackend = "pillow", media: str = "image",
    ) -> "ImageProcessor":
        """Read the constants for images or videos of a Hugging Face directory (``_CONFIG_FILES``).

        ``min_pixels`` and ``max_pixels`` of the data JSON (0: no bound) can only tighten those of the checkpoint; in
        LLaMA-Factory's rule both apply, one after the other.  Raises UserError for a missing file or field, and for
        settings that no Qwen2.5-VL checkpoint has.
        """
        path, values = _read_config(Path(directory), media)
        size: dict[str, Any] = values["size"] if isinstance(values.get("size"), dict) else {}
        bounds: dict[str, Any] = {
            "min_pixels": values.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels"),
            "max_pixels": values.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels"),
        }
        found = replace(_checked(path, values | bounds), is_upright=is_upright, backend=backend)
        if rule == "llamafactory":
            return replace(found, llama_factory=(min_pixels, max_pixels))
        lower, upper = max(found.min_pixels, min_pixels), min(found.max_pixels, max_pixels or found.max_pixels)
        if lower > upper:
            raise UserError(
                f"image_max_pixels = {max_pixels} and image_min_pixels = {min_pixels} of the data JSON, together with "
                f"min_pixels = {found.min_pixels} and max_pixels = {found.max_pixels} of {path}, leave no "
                f"size: the lower bound {lower} is above the upper bound {upper}.")
        return replace(found, min_pixels=lower, max_pixels=upper)

    def within(self, item: ImageItem) -> "ImageProcessor":
        """The processor for ``item``, with the item's own bounds where it has some."""
        if item.min_pixels is None and item.max_pixels is None:
            return self
        lower, upper = self.llama_factory or (self.min_pixels, self.max_pixels)
        bounds = lower if item.min_pixels is None else max(item.min_pixels, 1), item.max_pixels or upper
        if bounds[0] > bounds[1]:
            raise UserError(f"{item.path}: its min_pixels {bounds[0]} is above its max_pixels {bounds[1]}; change one.")
        if self.llama_factory is not None:
            return replace(self, llama_factory=bounds)
        return replace(self, min_pixels=bounds[0], max_pixels=bounds[1])

    def _grid(self, width: int, height: int) -> Grid:
        """Patches of an image of this size in pixels.  Raises ValueError for extreme aspect ratios."""
        width, height = [(width, height), *(size for size, _ in self._steps(width, height))][-1]
        factor = self.patch_size * self.merge_size
        new_height, new_width = smart_resize(height, width, factor, self.min_pixels, self.max_pixels)
        return 1, new_height // self.patch_size, new_width // self.patch_size

    def _steps(self, width: int, height: int) -> list[ResizeStep]:
        return [] if self.llama_factory is None else llama_factory_steps(width, height, *self.llama_factory)

    def plan(self, path: str | Inline) -> "ImagePlan":
        """Read the header of an image file.  Raises UserError as ``load_image``, and for extreme aspect ratios."""
        with decoding(path):
            size = image_size(path, self.is_upright)
        try:
            return ImagePlan(path, self, size, self._grid(*size))
        except ValueError as error:
            raise UserError(f"{path}: {error}; crop or remove the image.") from error

    def patches(self, plan: "ImagePlan") -> Tensor:
        """Decode, resize and cut an image file: uint8 [num_patches, channels x frames x patch_size x patch_size].

        The image is repeated ``temporal_patch_size`` times as frames.  Raises UserError as ``load_image``, and for an
        image whose header states another size.
        """
        with decoding(plan.path):
            pixels = self._resized_by_torch(plan) if self.backend == "torch" else self._resized_by_pillow(plan)
        return self.to_patches(pixels[None].expand(self.temporal_patch_size, -1, -1, -1))[0]

    def to_patches(self, frames: Tensor) -> tuple[Tensor, Grid]:
        """Frames, uint8 [num_frames, height, width, 3], as patches uint8 [num_patches, 3 x frames x side x side].

        Patches that are merged into one visual token are contiguous.
        """
        count, height, width, _ = frames.shape
        side, merge, depth = self.patch_size, self.merge_size, self.temporal_patch_size
        grid = count // depth, height // side, width // side
        times, rows, columns = grid
        pixels = frames.reshape(times, depth, rows // merge, merge, side, columns // merge, merge, side, 3)
        return pixels.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(times * rows * columns, -1), grid

    def joined(self, patches: Tensor, grid: Grid) -> Tensor:
        """The inverse of ``to_patches``: frames from patches."""
        (times, rows, columns), side, merge, depth = grid, self.patch_size, self.merge_size, self.temporal_patch_size
        pixels = patches.view(times, rows // merge, columns // merge, merge, merge, 3, depth, side, side)
        return pixels.permute(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(times * depth, rows * side, columns * side, 3)

    @property
    def normalisation(self) -> Normalisation:
        return Normalisation(255.0, self.image_mean, self.image_std)

    def _resized_by_pillow(self, plan: "ImagePlan") -> Tensor:
        """uint8 [height, width, 3]"""
        image = load_image(plan.path, self.is_upright, on_white=self.llama_factory is None)
        plan.check(image.width, image.height)
        height, width = (patches * self.patch_size for patches in plan.grid[1:])
        for size, how in (*self._steps(*plan.size), ((width, height), Image.Resampling.BICUBIC)):
            image = image.resize(size, how)
        return torch.from_numpy(np.array(image))

    def _resized_by_torch(self, plan: "ImagePlan") -> Tensor:
        """uint8 [height, width, 3], resized by torch: 16-bit filter coefficients, where Pillow uses 22 bits."""
        pixels = torch.from_numpy(load_pixels(plan.path, self.is_upright))
        plan.check(pixels.shape[1], pixels.shape[0])
        size = plan.grid[1] * self.patch_size, plan.grid[2] * self.patch_size
        resized = pixels.permute(2, 0, 1)[None]
        lost_rows, lost_columns = pixels.shape[0] - size[0], pixels.shape[1] - size[1]
        # Rounding between the passes makes their order visible.  This is Pillow's order since version 13 (Resample.c).
        sizes = [(size[0], pixels.shape[1]), size] if lost_rows > max(0, 2 * lost_columns) else [size]
        for one in sizes:
            resized = interpolate(resized, size=list(one), mode="bicubic", antialias=True)
        return resized[0].permute(1, 2, 0)


@dataclass(frozen=True)
class ImagePlan:
    """How one image will be read; its pixels are not decoded yet."""

    path: str | Inline
    processor: ImageProcessor
    size: tuple[int, int]
    """Width and height."""
    grid: Grid

    def check(self, width: int, height: int) -> None:
        """Raise UserError unless the decoded image has the size that its header states."""
        if self.size != (width, height):
            raise UserError(f"{self.path}: its header and its pixels disagree on the size ({self.size[0]} x "
                            f"{self.size[1]} and {width} x {height} pixels); replace or remove the file.")


def _read_config(directory: Path, media: str) -> tuple[Path, dict[str, Any]]:
    """The file that holds the settings of the image or video processor, and its settings."""
    for name in _CONFIG_FILES[media]:
        path = directory / name
        values = read_json(path).root if path.is_file() else None
        if values is not None and name == "processor_config.json":
            values = values.get(f"{media}_processor")
        if values is not None:
            _check_settings(path, values)
            return path, values
    raise UserError(f"{directory}: has no {' or '.join(_CONFIG_FILES[media][1:])}, so it is unknown how {media}s are "
                    f"resized; copy preprocessor_config.json from the published checkpoint.")


def _check_settings(path: Path, values: dict[str, Any]) -> None:
    """Refuse settings that would change the pixels and that this code does not implement."""
    supported = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True) | {
        "resample": int(Image.Resampling.BICUBIC), "rescale_factor": 1 / 255}
    refuse(f"{path}: {key} is {values[key]!r}; only {value!r} is supported, as in every Qwen2.5-VL checkpoint."
           for key, value in supported.items() if values.get(key, value) != value)


def _checked(path: Path, values: dict[str, Any]) -> ImageProcessor:
    """``values`` as an ``ImageProcessor``; null counts as absent."""
    given = {key: value for key, value in values.items() if value is not None}
    try:
        return TypeAdapter(ImageProcessor).validate_json(json.dumps(given))
    except ValidationError as error:
        raise UserError(
            f"{path}: {key} is {given.get(key)!r}; expected {expected(fields_of(ImageProcessor)[key])}: copy the file "
            f"from the published checkpoint."
            for key in dict.fromkeys(str(one["loc"][0]) for one in error.errors())) from error
