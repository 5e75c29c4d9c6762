"""Picture files: their size by their header, and their pixels as RGB.

A photograph is turned upright, transparency becomes white, an animation gives its first frame.  What size a picture is
brought to, and what becomes of its pixels, is not known here.
"""

import io
import os
import stat
from contextlib import suppress
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import ExifTags, Image

from mm.data.sample import Inline
from mm.errors import UserError

MAX_IMAGE_PIXELS = 50_000_000
"""Decoding more is refused: a file of a few kilobytes can claim gigabytes of pixels."""
MAX_IMAGE_BYTES = 1 << 29
"""Of a picture's file: what ``MAX_IMAGE_PIXELS`` take without compression, with 8 bytes each, is less."""
FORMATS = (
    "AVIF", "BLP", "BMP", "CUR", "DCX", "DDS", "DIB", "FITS", "FLI", "FTEX", "GBR", "GIF", "ICNS", "ICO", "IM", "IMT",
    "JPEG", "JPEG2000", "MCIDAS", "MSP", "PCD", "PCX", "PIXAR", "PNG", "PPM", "PSD", "QOI", "SGI", "SPIDER",
    "SUN", "TGA", "TIFF", "WEBP", "XBM", "XPM", "XVTHUMB",
)  # fmt: skip
"""What Pillow itself decodes.  For EPS it would start a PostScript interpreter; WMF it reads on Windows only; of other
formats it knows the name."""
_AS_JPEG = "convert it to a JPEG or PNG file"
_AGAIN = "fetch or copy it again, or remove it"
_OTHERS = (
    (b"ftyphei", "HEIC, which Pillow reads with a plugin only", _AS_JPEG),
    (b"ftypmif1", "HEIF, which Pillow reads with a plugin only", _AS_JPEG),
    (b"ftypavi", "AVIF, damaged or cut short", _AGAIN),
    (b"jxl \r\n\x87\n", "JPEG XL, which Pillow does not read", _AS_JPEG),
    (b"ftyp", "a video (MP4 or MOV)", "show it as a video"),
    (b"\x1aE\xdf\xa3", "a video (Matroska or WebM)", "show it as a video"),
    (b"<svg", "a drawing (SVG)", _AS_JPEG),
    (b"%!PS", "PostScript", _AS_JPEG),
    (b"%PDF", "a PDF document", "convert its pages to JPEG or PNG files"),
    (b"<html", "a web page", "the download failed: fetch the file itself"),
    (b"<!doctype html", "a web page", "the download failed: fetch the file itself"),
    (b"git-lfs", "a pointer of Git LFS", "fetch the file itself with 'git lfs pull'"),
)
"""What a file that is no picture holds in its first bytes (in small letters, but where only capitals can be), what it
then is, and what mends it."""
_BEGINNINGS = (
    (b"\xff\xd8\xff", "JPEG, damaged or cut short", _AGAIN),
    (b"\x89PNG", "PNG, damaged or cut short", _AGAIN),
    (b"GIF8", "GIF, damaged or cut short", _AGAIN),
    (b"RIFF", "WebP, damaged or cut short", _AGAIN),
    (b"II*\0", "TIFF, damaged or cut short", _AGAIN),
    (b"MM\0*", "TIFF, damaged or cut short", _AGAIN),
    (b"BM", "BMP, damaged or cut short", _AGAIN),
    (b"\0\0\x01\0", "ICO, damaged or cut short", _AGAIN),
    (b"\xff\x0a", "JPEG XL, which Pillow does not read", _AS_JPEG),
    (b"\x1f\x8b", "packed by gzip", "unpack it"),
    (b"PK\x03\x04", "a ZIP archive", "unpack it"),
    (b"\x93NUMPY", "an array of NumPy", _AS_JPEG),
    (b"{", "JSON, such as a server's error", "the download failed: fetch the file itself"),
    (b"<?xml", "XML, such as a server's error", "the download failed: fetch the file itself"),
    (b"data:image", "base64 text", "write the bytes that it stands for to the file"),
    (b"iVBORw0KGgo", "base64 text", "write the bytes that it stands for to the file"),
    (b"/9j/", "base64 text", "write the bytes that it stands for to the file"),
    (bytes(16), "zeros, as a lost write leaves them", _AGAIN),
)
"""The same of what begins with these bytes."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
"""EXIF orientation -> what turns the picture upright."""
_TURNED = (_TURNS[5], _TURNS[6], _TURNS[7], _TURNS[8])
"""Those that exchange width and height."""


def image_size(path: str | Inline, is_upright: bool = True) -> tuple[int, int]:
    """Width and height in pixels, from the header alone.  Raises UserError as ``load_image`` does for headers."""
    with _open(path) as image:
        is_turned = is_upright and _turn(image) in _TURNED
        return (image.height, image.width) if is_turned else (image.width, image.height)


def format_of(path: str | Inline) -> str | None:
    """How Pillow calls the kind of picture that a file is, as "PNG", or None for what is none."""
    with suppress(UserError), _open(path) as image:
        return image.format
    return None


def image_remarks(path: str | Inline) -> list[str]:
    """What a user may want to know of a picture that is read all the same, from its header."""
    with _open(path) as image:
        try:
            num_frames = getattr(image, "n_frames", 1)
        except Exception as error:  # Pillow looks for all frames
            raise _damaged(path, error) from error
        remarks = {
            "have more than 8 bits a channel, which are scaled": image.mode.split(";")[0] in ("I", "F"),
            "have several frames, of which the first is read": num_frames > 1,
            "have less than 28 pixels on a side, and are enlarged": min(image.size) < 28,
        }
    return [remark for remark, is_so in remarks.items() if is_so]


def load_image(path: str | Inline, is_upright: bool = True, on_white: bool = True) -> Image.Image:
    """Decode ``path`` to RGB, turned upright; ``on_white``: transparency becomes white, else it is dropped.

    16 bits a channel become 8 by their upper half, and numbers from 0 to 1 are scaled to 0 to 255; Pillow alone would
    make both white or black.  Raises UserError naming ``path`` when it is no regular file, no image, cut short, of
    other numbers or larger than ``MAX_IMAGE_PIXELS``.
    """
    with _open(path) as image:
        turn = _turn(image) if is_upright else None
        try:
            image.load()
        except Exception as error:  # Pillow's decoders raise errors of many types on broken files
            raise _damaged(path, error) from error
        shallow = _in_8_bits(image, path)
        if shallow.mode == "RGB" and "transparency" not in shallow.info:
            decoded = shallow  # as it is: a copy of a large picture takes milliseconds
        else:
            decoded = to_rgb(shallow) if on_white else shallow.convert("RGB")
        return decoded if turn is None else decoded.transpose(turn)


def load_pixels(path: str | Inline, is_upright: bool = True) -> np.ndarray:
    """The same pixels as ``load_image`` on white, uint8 [height, width, 3], sooner: a JPEG file goes past Pillow."""
    with _open(path) as image:
        is_plain = image.format in ("JPEG", "MPO") and image.mode == "RGB"
        turn = _turn(image) if is_upright else None
    if not is_plain:
        return np.array(load_image(path, is_upright))
    try:  # with the same library below it, and the same exact transforms
        content = Path(path).read_bytes() if isinstance(path, str) else path.content
        pixels = simplejpeg.decode_jpeg(content, "RGB", fastdct=False, fastupsample=False)
    except ValueError as error:
        raise _damaged(path, error) from error
    return pixels if turn is None else _turned(pixels, turn)


def _damaged(path: str | Inline, error: Exception) -> UserError:
    return UserError(f"{path}: the image is damaged or cut short ({error}); replace or remove it.")


def _turned(pixels: np.ndarray, turn: Image.Transpose) -> np.ndarray:
    """``Image.transpose`` of an array."""
    if turn in _TURNED:
        pixels = pixels.transpose(1, 0, 2)
    rows = slice(None, None, -1 if turn in (_TURNS[3], _TURNS[4], _TURNS[7], _TURNS[8]) else 1)
    columns = slice(None, None, -1 if turn in (_TURNS[2], _TURNS[3], _TURNS[6], _TURNS[7]) else 1)
    return np.ascontiguousarray(pixels[rows, columns])


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What turns ``image`` upright, from its header.  A TIFF file has been turned by Pillow."""
    exif = Image.Exif()
    try:
        exif.load(image.info.get("exif", b""))
        return _TURNS.get(exif.get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow raises errors of many types; broken data turn nothing, as in every viewer
        return None


def _open(path: str | Inline) -> Image.Image:
    """A Pillow image whose pixels are not yet decoded."""
    try:
        if isinstance(path, str):
            _check_file(path, os.stat(path))
        image = Image.open(path if isinstance(path, str) else io.BytesIO(path.content), formats=FORMATS)
    except Image.UnidentifiedImageError as error:
        raise UserError(f"{path}: is no picture that Pillow reads: {_beginning(path)}.") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"{path}: more than {MAX_IMAGE_PIXELS} pixels; make the image smaller.") from error
    except OSError as error:
        if error.errno is None:  # Pillow's own, of what the file holds
            raise _damaged(path, error) from error
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    except UserError:
        raise
    except Exception as error:  # Pillow raises errors of many types on odd headers
        raise UserError(f"{path}: Pillow does not read its header ({error}); save it anew, replace or remove it."
                        ) from error
    if image.width * image.height > MAX_IMAGE_PIXELS:
        image.close()
        raise UserError(
            f"{path}: {image.width} x {image.height} pixels, more than {MAX_IMAGE_PIXELS}; make the image smaller.")
    return image


def _check_file(path: str, found: os.stat_result) -> None:
    """Before anything is read."""
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path}: is no regular file; expected an image.")
    if found.st_size > MAX_IMAGE_BYTES:
        raise UserError(f"{path}: has {found.st_size:,} bytes, more than the {MAX_IMAGE_BYTES:,} that the file of a "
                        f"picture may have; save it smaller, as a JPEG or PNG file, or remove it.")


def _beginning(path: str | Inline) -> str:
    with open(path, "rb") if isinstance(path, str) else io.BytesIO(path.content) as stream:
        start = stream.read(200)
    if not start:
        return f"it is empty; {_AGAIN}"
    known = known_content(start)
    return f"it begins with {start[:16]!r}; give a JPEG or PNG file" if known is None else "it is {}; {}".format(*known)


def known_content(start: bytes) -> tuple[str, str] | None:
    """What a file is that begins with ``start`` and cannot be shown as it is, and what mends it; None if unknown."""
    for mark, what, cure in _OTHERS:
        if mark in start or mark in start.lower():
            return what, cure
    return next(((what, cure) for mark, what, cure in _BEGINNINGS if start.lstrip().startswith(mark)), None)


def _in_8_bits(image: Image.Image, path: str | Inline) -> Image.Image:
    """``image``, if it has more than 8 bits a channel, in 8."""
    mode = image.mode.split(";")[0]
    if mode not in ("I", "F"):
        return image
    values = np.asarray(image)
    low, high = values.min(), values.max()
    if mode == "I" and low >= 0 and high <= 0xFFFF:
        return Image.fromarray((values >> 8).astype(np.uint8))
    if mode == "F" and low >= 0 and high <= 255:  # false for numbers that are not finite
        return Image.fromarray((values * (255 if high <= 1 else 1)).round().astype(np.uint8))
    expected = "integers from 0 to 65535" if mode == "I" else "numbers from 0 to 1, or to 255"
    raise UserError(f"{path}: its pixels go from {low} to {high}; expected {expected}: convert the image to 8 bits.")


def to_rgb(image: Image.Image) -> Image.Image:
    """As transformers' ``convert_to_rgb`` for Pillow images."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
