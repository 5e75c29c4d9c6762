"""The content of one message as items: text with ``<image>`` and ``<video>``, or OpenAI's and Qwen's content lists.

An image or video without its own path takes the next one of the record's column: its path is empty here.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mm.config.schema import shown
from mm.data.record_name import described
from mm.data.sample import KINDS, Image, Inline, Media, Video
from mm.errors import UserError, nearest

Content = tuple[str | Media, ...]

_MARKED = {one.placeholder: one for one in KINDS.values()}
_PLACEHOLDERS = re.compile(f"({'|'.join(_MARKED)})")
_TYPES = ("text", "image", "video", "image_url", "video_url")
_WHOLE = ("nframes", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels")
"""Integer settings; ``fps`` and times may be fractions."""
_CHOOSING = ("nframes", "min_frames", "max_frames", "video_start", "video_end")
"""Settings that select frames of a video file."""
_OF_LISTS = ("sample_fps", "raw_fps")
_MOST = 1e15
"""Limit for all settings.  No real number of pixels or seconds is larger, and JSON integers can be arbitrarily long."""
_MAY_BE_ZERO = ("min_pixels", "video_start")
_IN_ORDER = (("min_pixels", "max_pixels"), ("min_frames", "max_frames"), ("video_start", "video_end"))


def content_of(content: Any, role: str, where: str, name: str) -> Content:
    """The items of a message's ``content``, found under the key ``name`` in the message ``where``.

    Only user turns contain media: in other roles, placeholders are text and media in lists are refused.  Adjacent
    texts are merged.  OpenAI's ``detail`` of an image is ignored.  Raises UserError for invalid content.
    """
    if isinstance(content, str):
        pieces: list[str | Media] = [content]
        if role == "user":
            pieces = [_MARKED[piece]("") if piece in _MARKED else piece for piece in _PLACEHOLDERS.split(content)]
    elif isinstance(content, list):
        pieces = [_item(item, f"item {number} of {where}") for number, item in enumerate(content)]
        if role != "user" and not all(isinstance(piece, str) for piece in pieces):
            raise UserError(f"{where} ({role}) contains an image or a video; only the user's turns may.")
    else:
        raise UserError(
            f"{where} has {name!r} = {described(content)}; expected a string with {Image.placeholder} and "
            f"{Video.placeholder} for media, or a list of items like {{'type': 'text', 'text': ...}}."
        )
    return _joined(pieces)


def with_places(text: str, num_media: Mapping[str, int]) -> str:
    """``text`` with a placeholder per image and video, added in front unless it already has some of that kind."""
    missing = (one for one in KINDS.values() if one.placeholder not in text)
    return "".join(one.placeholder * num_media[one.kind] for one in missing) + text


def _joined(pieces: list[str | Media]) -> Content:
    """Drop empty texts, and merge adjacent texts."""
    items: list[str | Media] = []
    for piece in pieces:
        if isinstance(piece, str) and items and isinstance(items[-1], str):
            items[-1] += piece
        elif piece != "":
            items.append(piece)
    return tuple(items)


def _item(item: Any, where: str) -> str | Media:
    if isinstance(item, str):
        return item
    if not isinstance(item, dict):
        raise UserError(f"{where} is {described(item)}; expected an object like {{'type': 'text', 'text': ...}}.")
    kind = item.get("type", next((one for one in _TYPES if one in item), None))
    if kind not in _TYPES:
        raise UserError(f"{where} has the type {shown(kind)}{nearest(str(kind), _TYPES)}; expected one of "
                        f"{', '.join(map(shown, _TYPES))}.")
    value = item.get(kind)
    if kind == "text":
        if not isinstance(value, str):
            raise UserError(f"{where} has 'text' = {described(value)}; expected a string.")
        if other := next((one for one in _TYPES[1:] if item.get(one)), None):
            raise UserError(f"{where} has 'text' and {other!r}; make it two items, in the order of the message.")
        return value
    if kind.endswith("_url"):
        value = value.get("url") if isinstance(value, dict) else value
        if value is None:
            raise UserError(f"{where} has no 'url' in its {kind!r}; expected the path of a file, or file:///PATH.")
    frames = listed_frames(value, f"{where} has {kind!r}") if kind == "video" and isinstance(value, list) else None
    if frames is None and value is not None and not (isinstance(value, str | Inline) and value):
        raise UserError(f"{where} has {kind!r} = {shown(value)}; expected the path of a file"
                        f"{', or a list of the paths of its frames' if kind == 'video' else ''}.")
    cls = KINDS[kind.removesuffix("_url")]
    known = [field.name for field in fields(cls) if field.name != "path"]
    settings = {key: one for key, one in item.items() if key not in ("type", kind) and one is not None}
    for key in settings:
        if key not in known:
            hint = ": give min_pixels and max_pixels instead" if key.startswith("resized_") else nearest(key, known)
            raise UserError(f"{where} has {key!r}, which is not a setting for {cls.kind}s{hint}; known: "
                            f"{', '.join(known)}.")
    path: Any = frames or value or ""
    return cls(path, **_checked(settings, where, frames is not None))


def listed_frames(value: list[Any], what: str) -> tuple[str, ...]:
    """The frames of a video given as a list of images.  Raises UserError; ``what`` begins its message."""
    if not value or not all(isinstance(path, str) and path for path in value):
        raise UserError(f"{what} = {shown(value)}; expected the paths of its frames, each an image.")
    return tuple(value)


def _checked(settings: dict[str, Any], where: str, is_listed: bool) -> dict[str, Any]:
    """Check the settings of an image or video, and convert integer ones."""
    for key in settings:
        if is_listed and key in _CHOOSING:
            raise UserError(f"{where} has {key!r}, but its video is a list of frames, which are all used; list fewer, "
                            f"or give sample_fps, the number of listed frames per second.")
        if not is_listed and key in _OF_LISTS:
            raise UserError(f"{where} has {key!r}, but its video is not a list of frames; give fps, the number of "
                            f"frames to take per second.")
    for key, value in settings.items():
        is_whole = key in _WHOLE
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST
        if not is_number or (value == 0 and key not in _MAY_BE_ZERO) or (is_whole and value != int(value)):
            what = f"a {'whole ' * is_whole}number {'of at least' if key in _MAY_BE_ZERO else 'above'} 0"
            raise UserError(f"{where} has {key!r} = {shown(value)}; expected {what}, and at most {_MOST:g}.")
    if {"fps", "sample_fps"} <= settings.keys():
        raise UserError(f"{where} has both 'fps' and 'sample_fps', which mean the same for a list of frames; keep one.")
    if {"fps", "nframes"} <= settings.keys():
        raise UserError(f"{where} has both 'fps' and 'nframes'; keep one of them.")
    for low, high in _IN_ORDER:
        if {low, high} <= settings.keys() and settings[low] > settings[high]:
            raise UserError(f"{where} has {low!r} = {settings[low]} above {high!r} = {settings[high]}.")
    return {key: int(value) if key in _WHOLE else float(value) for key, value in settings.items()}
