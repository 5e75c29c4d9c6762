"""Image files as the numbers that the ViT reads.

Equal to the last bit to transformers' ``Qwen2VLImageProcessorPil``, which is slower and lacks the checks on files: a
photograph is turned upright, transparency becomes white, and an animation gives its first frame.  LLaMA-Factory, whose
rule MindSpeed-MM has, makes another picture of it first.
"""

import json
import math
import operator
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Gt
from PIL import ExifTags, Image
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from mm.batch import Grid
from mm.config.data import ResizeRule
from mm.config.read import read_json
from mm.config.schema import Count, NotNegative, Number, expected, fields_of
from mm.errors import UserError, refuse

MAX_IMAGE_PIXELS = 50_000_000
"""Decoding more is refused: a file of a few kilobytes can claim gigabytes of pixels."""
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Only formats that are pictures: Pillow starts a PostScript interpreter for EPS."""
_DEEP_MODES = ("F", "I")
"""Pillow modes of more than 8 bits a channel; its conversion to RGB would clip almost all of them to white."""
_CONFIG_FILES = {
    "image": ("processor_config.json", "preprocessor_config.json"),
    "video": ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"),
}  # fmt: skip
"""Where the settings of each may be, in transformers' order; the first has those of both."""


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: float) -> tuple[int, int]:
    """The size (height, width) to which an image is resized: multiples of ``factor``, the area within the bounds.

    The same numbers as transformers' function of this name, whose module takes seconds to import.  The aspect ratio is
    kept as far as the multiples allow.  Raises ValueError when one side is more than 200 times the other.
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


Step = tuple[tuple[int, int], Image.Resampling]
"""A size (width, height) to which a picture is brought, and how."""


def llama_factory_steps(width: int, height: int, min_pixels: int, max_pixels: int) -> list[Step]:
    """How LLaMA-Factory resizes a picture before transformers' processor does (its ``_preprocess_image``).

    The area comes within the bounds, a side below 28 becomes 28, and a side ratio above 200 becomes 180.  Raises
    ValueError when a side vanishes on the way.
    """
    steps: list[Step] = []
    for bound, is_outside in ((max_pixels, operator.gt), (min_pixels, operator.lt)):
        if is_outside(width * height, bound):
            factor = math.sqrt(bound / (width * height))
            width, height = int(width * factor), int(height * factor)
            if 0 in (width, height):
                raise ValueError(f"a side vanishes when {bound} pixels are made of it")
            steps.append(((width, height), Image.Resampling.NEAREST))
    if min(width, height) < 28:
        width, height = max(width, 28), max(height, 28)
        steps.append(((width, height), Image.Resampling.BICUBIC))
    if max(width, height) / min(width, height) > 200:
        width, height = min(width, height * 180), min(height, width * 180)
        steps.append(((width, height), Image.Resampling.BICUBIC))
    return steps


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
"""EXIF orientation -> what turns the picture upright."""
_TURNED = (_TURNS[5], _TURNS[6], _TURNS[7], _TURNS[8])
"""Those that exchange width and height."""


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What turns ``image`` upright, from its header.  A TIFF file has been turned by Pillow."""
    exif = Image.Exif()
    exif.load(image.info.get("exif", b""))
    return _TURNS.get(exif.get(ExifTags.Base.Orientation, 1))


def load_image(path: str, is_upright: bool = True, on_white: bool = True) -> Image.Image:
    """Decode ``path`` to RGB, turned upright; ``on_white``: transparency becomes white, else it is dropped.

    Raises UserError naming ``path`` when it is no regular file, no image, cut short, deeper than 8 bits a channel or
    larger than ``MAX_IMAGE_PIXELS``.
    """
    with _open(path) as image:
        turn = _turn(image) if is_upright else None
        try:
            image.load()
        except Exception as error:  # Pillow's decoders raise errors of many types on broken files
            raise UserError(f"{path}: the image is damaged or cut short ({error}); replace or remove it.") from error
        decoded = _to_rgb(image) if on_white else image.convert("RGB")
        return decoded if turn is None else decoded.transpose(turn)


def _open(path: str) -> Image.Image:
    """A Pillow image whose pixels are not yet decoded."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UserError(f"{path}: is no regular file; expected an image.")
        image = Image.open(path, formats=_FORMATS)
    except Image.UnidentifiedImageError as error:
        formats = ", ".join(_FORMATS)
        raise UserError(f"{path}: is no image in one of the formats {formats}; {_beginning(path)}.") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"{path}: more than {MAX_IMAGE_PIXELS} pixels; make the image smaller.") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from error
    problem = None
    if image.width * image.height > MAX_IMAGE_PIXELS:
        problem = f"{image.width} x {image.height} pixels, more than {MAX_IMAGE_PIXELS}; make the image smaller"
    elif image.mode.split(";")[0] in _DEEP_MODES:
        problem = f"more than 8 bits a channel (mode {image.mode}); convert the image to 8 bits"
    if problem:
        image.close()
        raise UserError(f"{path}: {problem}.")
    return image


def _beginning(path: str) -> str:
    with open(path, "rb") as stream:
        start = stream.read(16)
    return f"it begins with {start!r}" if start else "it is empty"


def _to_rgb(image: Image.Image) -> Image.Image:
    """As transformers' ``convert_to_rgb`` for Pillow images."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


_Positive = Annotated[Number, Gt(0)]
_PerChannel = Annotated[tuple[NotNegative, NotNegative, NotNegative], Field(title="three numbers")]
_PositivePerChannel = Annotated[tuple[_Positive, _Positive, _Positive], Field(title="three numbers above 0")]


@dataclass(frozen=True, config=ConfigDict(strict=True))
class ImageProcessor:
    """Sizes and constants of the image side, by their names in Hugging Face's files."""

    min_pixels: Count
    max_pixels: Count
    patch_size: Count
    temporal_patch_size: Count
    merge_size: Count
    image_mean: _PerChannel
    image_std: _PositivePerChannel
    is_upright: bool = True
    """Whether photographs are turned upright."""
    llama_factory: tuple[int, int] | None = None
    """The least and most pixels of LLaMA-Factory's rule, where that is applied first."""

    @classmethod
    def from_directory(
        cls, directory: str, min_pixels: int = 0, max_pixels: int = 0, rule: ResizeRule = "transformers",
        is_upright: bool = True, media: str = "image",
    ) -> "ImageProcessor":
        """Read the constants of a Hugging Face directory, which the data JSON's pixel bounds may only tighten.

        ``min_pixels`` and ``max_pixels`` are ``image_min_pixels`` and ``image_max_pixels``; 0 is no bound.  Of two
        bounds on one side the tighter holds; in LLaMA-Factory's rule both do, one after the other.  Constants come from
        ``processor_config.json`` (its ``image_processor``), else ``preprocessor_config.json``: transformers' order.
        ``media`` "video" reads those of videos.

        Raises UserError for a missing file or field, and for settings that no Qwen2.5-VL checkpoint has.
        """
        path, values = _read_config(Path(directory), media)
        size: dict[str, Any] = values["size"] if isinstance(values.get("size"), dict) else {}
        bounds: dict[str, Any] = {
            "min_pixels": values.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels"),
            "max_pixels": values.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels"),
        }
        found = replace(_checked(path, values | bounds), is_upright=is_upright)
        if rule == "llamafactory":
            return replace(found, llama_factory=(min_pixels, max_pixels))
        lower, upper = max(found.min_pixels, min_pixels), min(found.max_pixels, max_pixels or found.max_pixels)
        if lower > upper:
            raise UserError(
                f"image_max_pixels = {max_pixels} and image_min_pixels = {min_pixels} of the data JSON, together with "
                f"min_pixels = {found.min_pixels} and max_pixels = {found.max_pixels} of {path}, leave no "
                f"size: the lower bound {lower} is above the upper bound {upper}."
            )
        return replace(found, min_pixels=lower, max_pixels=upper)

    def _grid(self, width: int, height: int) -> Grid:
        """Patches of an image of this size in pixels.  Raises ValueError when the rule does not take it."""
        width, height = [(width, height), *(size for size, _ in self._steps(width, height))][-1]
        factor = self.patch_size * self.merge_size
        new_height, new_width = smart_resize(height, width, factor, self.min_pixels, self.max_pixels)
        return 1, new_height // self.patch_size, new_width // self.patch_size

    def _steps(self, width: int, height: int) -> list[Step]:
        return [] if self.llama_factory is None else llama_factory_steps(width, height, *self.llama_factory)

    def load(self, path: str) -> Image.Image:
        """Decode an image file as the rule does.  Raises UserError as ``load_image`` does."""
        return load_image(path, self.is_upright, on_white=self.llama_factory is None)

    def image_grid(self, path: str) -> Grid:
        """Patches of an image file, from its header alone.  Raises UserError as ``load_image`` does, and for strips."""
        with _open(path) as image:
            is_turned = self.is_upright and _turn(image) in _TURNED
            size = image.size[::-1] if is_turned else image.size
        try:
            return self._grid(*size)
        except ValueError as error:
            raise UserError(f"{path}: {error}; crop or remove the image.") from error

    def patches(self, image: Image.Image) -> tuple[Tensor, Grid]:
        """Resize, normalise and cut an RGB image.

        Returns float32 [num_patches, channels x frames x patch_size x patch_size] and the grid.  Patches that merge
        into one visual token lie together.  A still image is repeated to fill ``temporal_patch_size`` frames.
        """
        grid = self._grid(*image.size)
        for size, how in self._steps(*image.size):
            image = image.resize(size, how)
        _, rows, columns = grid
        side, merge, frames = self.patch_size, self.merge_size, self.temporal_patch_size
        resized = image.resize((columns * side, rows * side), resample=Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(resized))
        # Bytes are permuted, and only one frame is computed: an eighth of what moving floats of all frames would cost.
        pixels = pixels.view(rows // merge, merge, side, columns // merge, merge, side, 3)
        pixels = pixels.permute(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, side * side)
        # Three roundings, not one fused multiply-add: this is what transformers' numpy code rounds to, for every byte.
        mean, std = torch.tensor(self.image_mean).view(3, 1, 1), torch.tensor(self.image_std).view(3, 1, 1)
        values = pixels.float().div_(255).sub_(mean).div_(std)
        return values.expand(-1, -1, frames, -1).reshape(rows * columns, -1), grid


def _read_config(directory: Path, media: str) -> tuple[Path, dict[str, Any]]:
    """The file that holds the settings of the image or video processor, and these."""
    for name in _CONFIG_FILES[media]:
        path = directory / name
        if not path.is_file():
            continue
        values = read_json(path).root
        if name == "processor_config.json" and isinstance(values, dict):
            values = values.get(f"{media}_processor")
        if not isinstance(values, dict | None):
            raise UserError(f"{path}: holds {str(values)[:40]!r}; expected an object with the processor's settings.")
        if values is not None:
            _check_settings(path, values)
            return path, values
    raise UserError(f"{directory}: has no preprocessor_config.json; copy it from the published checkpoint.")


def _check_settings(path: Path, values: dict[str, Any]) -> None:
    """Refuse settings that would change the picture and that this code does not have."""
    supported = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": int(Image.Resampling.BICUBIC),
        "rescale_factor": 1 / 255,
    }
    refuse(
        f"{path}: {key} is {values[key]!r}; only {value!r} is supported, as in every Qwen2.5-VL checkpoint."
        for key, value in supported.items()
        if values.get(key, value) != value
    )


def _checked(path: Path, values: dict[str, Any]) -> ImageProcessor:
    """``values`` as the constants of a processor; null counts as absent."""
    given = {key: value for key, value in values.items() if value is not None}
    try:
        return TypeAdapter(ImageProcessor).validate_json(json.dumps(given))
    except ValidationError as error:
        wrong = dict.fromkeys(str(one["loc"][0]) for one in error.errors())
        missing = ", ".join(key for key in wrong if key not in given)
        problems = [f"{path}: has no {missing}; copy the file from the published checkpoint."] if missing else []
        problems += [
            f"{path}: {key} is {given[key]!r}; expected {expected(fields_of(ImageProcessor)[key])}. Copy the file from "
            f"the published checkpoint."
            for key in wrong if key in given
        ]
        raise UserError(problems) from error
