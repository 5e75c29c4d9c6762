"""The content of one message as items, and the keys of records and messages that nothing reads.

A content is text with ``<image>`` and ``<video>``, or one of OpenAI's and Qwen's content lists.  An image or video
without its own path takes the next one of the record's column: its path is empty here.

Keys with which another trainer would learn something else are refused.  Known metadata are ignored silently, and
``unread`` names all others for a note.
"""

import re
from collections.abc import Container, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from mm.config.mindspeed import AUDIO, PREFERENCES, TOOLS
from mm.config.schema import shown
from mm.data.records.record_name import described
from mm.data.sample import KINDS, Inline, Media
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
"""No real number of pixels or seconds is larger, and JSON integers can be arbitrarily long."""
_MAY_BE_ZERO = ("min_pixels", "video_start")
_IN_ORDER = (("min_pixels", "max_pixels"), ("min_frames", "max_frames"), ("video_start", "video_end"))

MEDIA = ("image", "images", "video", "videos")
"""The usual names of the columns with media."""
_MISSPELT = 0.8
"""Similarity from which a key counts as a misspelling of one: ``imgae``, but not ``image_id`` or ``image_dir``."""
_PATHS = {"img": "image", "imgs": "images", **{
    f"{kind}_{what}{s}": f"{kind}{s}" for kind in KINDS for what in ("path", "file", "url") for s in ("", "s")}}
"""Other names of these columns."""

_PAIRS = f"it is part of a preference pair (DPO), and {PREFERENCES}; keep one answer, in the conversation"
_KTO = f"it marks a good or bad answer (KTO), and {PREFERENCES}; remove bad answers, then the key"
_CONTRAST = "it is for training embeddings in ms-swift; remove it"
_OF_ANSWERS: Mapping[str, str] = {
    **dict.fromkeys(("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_images"), _PAIRS),
    **dict.fromkeys(("label", "kto_tag"), _KTO),
    **dict.fromkeys(("positive_messages", "negative_messages"), _CONTRAST),
}
"""Why a key of a record is refused, and the cure.  A prompt may have these."""
_REFUSED: Mapping[str, str] = {
    **_OF_ANSWERS,
    **dict.fromkeys(("audio", "audios"), f"{AUDIO}; remove it or the sample"),
    **dict.fromkeys(("tools", "functions"), f"it describes tools, and {TOOLS}; remove it together with all calls"),
    "objects": "ms-swift's grounding puts its boxes into the text, in place of <bbox> and <ref-object>; write them "
               "into the text, in pixels of the resized image",
    "system": "attr.system in the data JSON does not name it; set attr.system to \"system\", or remove it",
    "history": "only alpaca's form has it, where attr.history in the data JSON names it; set attr.history to "
               "\"history\", or remove it",
}
_LOSS = ("loss", "loss_scale", "weight", "train")
"""Keys of a message with its weight in the loss, in ms-swift, OpenAI's form and axolotl."""
_CALLS = ("tool_calls", "tool_call_id", "function_call", "tools")
_FILES = (*MEDIA, "audio", "audios")

HARMLESS = frozenset((
    "id", "idx", "index", "uid", "uuid", "guid", "__key__", "sample_id", "question_id", "conversation_id", "image_id",
    "video_id", "source", "data_source", "dataset", "dataset_name", "channel", "category", "type", "task", "tags",
    "topic", "meta", "metadata", "meta_info", "extra_info", "license", "model", "language", "lang", "width",
    "height", "image_width", "image_height", "image_size", "height_list", "width_list", "num_tokens", "length",
    "timestamp", "created_at", "date", "author", "title", "md5", "sha256", "hash", "__index_level_0__"))
"""Metadata of records and messages that no trainer learns from."""
_EMPTY: tuple[Any, ...] = (None, "", [], {}, "[]")
"""ms-swift and LLaMA-Factory write the list of tools as a string."""


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
        raise UserError(f"{where} has {name!r} = {described(content)}; expected a string, or a list of items like "
                        f"{{'type': 'text', 'text': ...}}.")
    items: list[str | Media] = []
    for piece in pieces:
        if isinstance(piece, str) and items and isinstance(items[-1], str):
            items[-1] += piece
        elif piece != "":
            items.append(piece)
    return tuple(items)


def with_places(text: str, num_media: Mapping[str, int]) -> str:
    """``text`` with a placeholder per image and video, added in front unless it already has some of that kind."""
    missing = (one for one in KINDS.values() if one.placeholder not in text)
    return "".join(one.placeholder * num_media[one.kind] for one in missing) + text


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
    if (key := next((one for one in settings if one not in known), None)) is not None:
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
    for key, value in settings.items():
        if is_listed and key in _CHOOSING:
            raise UserError(f"{where} has {key!r}, but its video is a list of frames, which are all used; list fewer, "
                            f"or give sample_fps, the number of listed frames per second.")
        if not is_listed and key in _OF_LISTS:
            raise UserError(f"{where} has {key!r}, but its video is not a list of frames; give fps, the number of "
                            f"frames to take per second.")
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST
        if not is_number or (value == 0 and key not in _MAY_BE_ZERO) or (key in _WHOLE and value != int(value)):
            what = f"a {'whole ' * (key in _WHOLE)}number {'of at least' if key in _MAY_BE_ZERO else 'above'} 0"
            raise UserError(f"{where} has {key!r} = {shown(value)}; expected {what}.")
    for other in ("sample_fps", "nframes"):
        if {"fps", other} <= settings.keys():
            raise UserError(f"{where} has both 'fps' and {other!r}; keep one of them.")
    for low, high in _IN_ORDER:
        if {low, high} <= settings.keys() and settings[low] > settings[high]:
            raise UserError(f"{where} has {low!r} = {settings[low]} above {high!r} = {settings[high]}.")
    return {key: int(value) if key in _WHOLE else float(value) for key, value in settings.items()}


def unread(value: Mapping[str, Any], read: Container[str]) -> list[str]:
    """The keys of a record or message that nothing reads, besides ``read``: neither metadata nor empty."""
    return [key for key in value if key not in read and key not in HARMLESS and not _is_empty(value[key])]


def unread_of_message(message: Mapping[str, Any], read: Container[str]) -> list[str]:
    """The same for a message whose keys were not refused."""
    return [key for key in unread(message, read) if key not in _LOSS]


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict | list) and value:
        return all(one in _EMPTY for one in (value.values() if isinstance(value, dict) else value))
    return value in _EMPTY


def refuse_key(key: str, value: Any, is_prompt: bool) -> None:
    """Raises UserError for a key of a record with which another trainer would learn something else."""
    is_metadata = (_REFUSED.get(key) == _KTO and not isinstance(value, bool)) or (is_prompt and key in _OF_ANSWERS)
    if key in _REFUSED and not is_metadata:
        raise UserError(f"has {key!r}, which this version does not support: {_REFUSED[key]}.")


def refuse_media_key(key: str, value: Any) -> None:
    """Refuse what looks like a column of images or videos in a sample without any, which would be one of text only."""
    word = key.casefold()
    meant = [_PATHS[word]] if word in _PATHS else get_close_matches(word, MEDIA, n=1, cutoff=_MISSPELT)
    if meant and isinstance(value, str | list | Inline):
        raise UserError(f"has {key!r}, which nothing reads (did you mean {meant[0]!r}?); rename or remove it.")


def refuse_message_key(key: str, value: Any, role: str, where: str) -> None:
    """Raises UserError for a key of a message with which another trainer would learn something else."""
    if key in _LOSS and value != (role == "assistant"):
        raise UserError(f"{where} ({role}) has {key!r} = {shown(value)}, but which turns are trained on is set for all "
                        f"samples, by mask_history and train_on_prompt in the data JSON; remove it.")
    if key in _CALLS:
        raise UserError(f"{where} ({role}) has {key!r}, but {TOOLS}; remove the calls, or the sample.")
    if key in _FILES:
        raise UserError(f"{where} ({role}) has {key!r}, which nothing reads there; give files in a column of the "
                        f"record, or as items of the message's content.")
