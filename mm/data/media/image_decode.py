"""Image files: their size from the header, and their pixels as RGB.

Photographs are rotated upright, transparency becomes white, and animations give their first frame.
"""

import io
import os
import stat
from contextlib import suppress
from typing import IO, cast

import numpy as np
import simplejpeg
from PIL import ExifTags, Image

from mm.data.sample import Inline
from mm.errors import UserError

MAX_IMAGE_PIXELS = 50_000_000
"""Larger images are refused: a file of a few kilobytes can claim gigabytes of pixels."""
_NOT_DECODED = ("EPS", "WMF", "GRIB", "HDF5", "BUFR", "MPEG")
"""Formats that Pillow identifies but cannot decode by itself; for EPS it starts a PostScript interpreter."""
_AS_JPEG = "convert it to a JPEG or PNG file"
_SIGNATURES = (
    (b"ftyphei", "HEIC, which Pillow reads only with a plugin", _AS_JPEG),
    (b"ftypmif1", "HEIF, which Pillow reads only with a plugin", _AS_JPEG),
    (b"ftyp", "a video (MP4 or MOV)", "use it as a video"),
    (b"\x1aE\xdf\xa3", "a video (Matroska or WebM)", "use it as a video"),
    (b"<svg", "a drawing (SVG)", _AS_JPEG),
    (b"%PDF", "a PDF document", "convert its pages to JPEG or PNG files"),
    (b"<html", "a web page", "the download failed: fetch the file itself"),
    (b"<!doctype html", "a web page", "the download failed: fetch the file itself"),
    (b"git-lfs", "a pointer of Git LFS", "fetch the file itself with 'git lfs pull'"),
)
"""Content that is not an image: a part of its first bytes (also matched in lower case), what it is, and the fix."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
"""EXIF orientation -> the transpose that turns the image upright."""
_TURNED = (_TURNS[5], _TURNS[6], _TURNS[7], _TURNS[8])
"""Those that swap width and height."""


def image_size(path: str | Inline, is_upright: bool = True) -> tuple[int, int]:
    """Width and height in pixels, from the header alone.  Raises UserError as ``load_image`` does for headers."""
    with _open(path) as image:
        is_turned = is_upright and _turn(image) in _TURNED
        return (image.height, image.width) if is_turned else (image.width, image.height)


def format_of(path: str | Inline) -> str | None:
    """Pillow's name for the format of an image file, such as "PNG"; None if it is not an image."""
    with suppress(UserError), _open(path) as image:
        return image.format
    return None


def load_image(path: str | Inline, is_upright: bool = True, on_white: bool = True) -> Image.Image:
    """Decode ``path`` to RGB, rotated upright.  ``on_white``: composite transparency on white instead of dropping it.

    16-bit channels keep their upper 8 bits, and floats from 0 to 1 are scaled to 0 to 255, which Pillow alone would
    not do.  Raises UserError naming ``path`` when it is not a regular file or image, is damaged or too large.
    """
    with _open(path) as image:
        return _decoded(image, path, is_upright, on_white)


def load_pixels(path: str | Inline, is_upright: bool = True) -> np.ndarray:
    """The same pixels as ``load_image`` on white, uint8 [height, width, 3], but faster: JPEG files bypass Pillow."""
    with _open(path) as image:
        if image.format not in ("JPEG", "MPO") or image.mode != "RGB":
            return np.array(_decoded(image, path, is_upright, on_white=True))
        turn, stream = _turn(image) if is_upright else None, cast(IO[bytes], image.fp)
        stream.seek(0)
        content = stream.read()
    try:  # based on the same library, with the same exact transforms
        pixels = simplejpeg.decode_jpeg(content, "RGB", fastdct=False, fastupsample=False)
    except ValueError as error:
        raise _damaged(path, error) from error
    return pixels if turn is None else np.array(Image.fromarray(pixels).transpose(turn))


def jpeg(pixels: np.ndarray, longest_side: int) -> bytes:
    """An image of uint8 [height, width, 3] as JPEG, with at most ``longest_side`` pixels on each side."""
    image = Image.fromarray(pixels)
    image.thumbnail((longest_side, longest_side), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=85)
    return stream.getvalue()


def _decoded(image: Image.Image, path: str | Inline, is_upright: bool, on_white: bool) -> Image.Image:
    turn = _turn(image) if is_upright else None
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise many error types on broken files
        raise _damaged(path, error) from error
    shallow = _in_8_bits(image, path)
    if shallow.mode == "RGB" and "transparency" not in shallow.info:
        decoded = shallow  # not copied: that takes milliseconds for a large image
    else:
        decoded = to_rgb(shallow) if on_white else shallow.convert("RGB")
    return decoded if turn is None else decoded.transpose(turn)


def _damaged(path: str | Inline, error: Exception) -> UserError:
    return UserError(f"{path}: the image is damaged or truncated ({error}); replace or remove it.")


def _turn(image: Image.Image) -> Image.Transpose | None:
    """The transpose that turns ``image`` upright.  Pillow itself has already rotated TIFF files."""
    exif = Image.Exif()
    try:
        exif.load(image.info.get("exif", b""))
        return _TURNS.get(exif.get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow raises many error types; broken EXIF data is ignored, as image viewers do
        return None


def _open(path: str | Inline) -> Image.Image:
    """A Pillow image whose pixels are not decoded yet."""
    Image.init()
    formats = [one for one in Image.ID if one not in _NOT_DECODED]
    try:
        if isinstance(path, str) and not stat.S_ISREG(os.stat(path).st_mode):
            raise UserError(f"{path}: is not a regular file; expected an image.")
        image = Image.open(path if isinstance(path, str) else io.BytesIO(path.content), formats=formats)
    except Image.UnidentifiedImageError as error:
        raise UserError(f"{path}: is not an image that Pillow can read: {_beginning(path)}.") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"{path}: has more than {MAX_IMAGE_PIXELS} pixels; make the image smaller.") from error
    except OSError as error:
        if error.errno is None:  # raised by Pillow about the content
            raise _damaged(path, error) from error
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    except (UserError, MemoryError):
        raise
    except Exception as error:  # Pillow raises many error types on unusual headers
        raise _damaged(path, error) from error
    if image.width * image.height > MAX_IMAGE_PIXELS:
        image.close()
        raise UserError(
            f"{path}: has {image.width} x {image.height} pixels, above the limit of {MAX_IMAGE_PIXELS}; make the image "
            f"smaller.")
    return image


def _beginning(path: str | Inline) -> str:
    with open(path, "rb") if isinstance(path, str) else io.BytesIO(path.content) as stream:
        start = stream.read(200)
    known = known_content(start)
    return f"it starts with {start[:16]!r}; use a JPEG or PNG file" if known is None else "it is {}; {}".format(*known)


def known_content(start: bytes) -> tuple[str, str] | None:
    """What a file that starts with ``start`` is, if it is not an image, and the fix; None if unknown."""
    if not start.strip(b"\0"):
        return "empty, or zeros left by a lost write", "fetch or copy it again, or remove it"
    return next(((what, fix) for part, what, fix in _SIGNATURES if part in start or part in start.lower()), None)


def _in_8_bits(image: Image.Image, path: str | Inline) -> Image.Image:
    """``image`` with 8 bits per channel."""
    mode = image.mode.split(";")[0]
    if mode not in ("I", "F"):
        return image
    values = np.asarray(image)
    low, high = values.min(), values.max()
    if mode == "I" and low >= 0 and high <= 0xFFFF:
        return Image.fromarray((values >> 8).astype(np.uint8))
    if mode == "F" and low >= 0 and high <= 255:  # False for non-finite values
        return Image.fromarray((values * (255 if high <= 1 else 1)).round().astype(np.uint8))
    expected = "integers from 0 to 65535" if mode == "I" else "numbers from 0 to 1, or to 255"
    raise UserError(f"{path}: has pixel values from {low} to {high}; expected {expected}: convert the image to 8 bits.")


def to_rgb(image: Image.Image) -> Image.Image:
    """Same as transformers' ``convert_to_rgb`` for Pillow images."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
