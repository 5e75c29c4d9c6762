"""One raw record of any format as a ``Sample``: ShareGPT, MindSpeed-MM, LLaVA, OpenAI, Qwen or Alpaca.

Columns, roles and placeholders come from ``Attributes``; a record without these is searched for the usual names.  Keys
with which another trainer would learn something else are refused, known metadata are ignored, and all others are noted.
Messages here say what is wrong with a record; the caller adds its place.
"""

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from mm.config.data import Attributes
from mm.config.mindspeed import AUDIO, PREFERENCES, TOOLS, TWO_COLUMNS
from mm.config.parse import shown
from mm.data.records.roots import MediaRoots
from mm.data.sample import KINDS, Image, Inline, Media, Sample, Turn, described
from mm.errors import UserError, counted, nearest

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
    """The items of a message's ``content``, text or a list of OpenAI's or Qwen's, found under the key ``name``.

    Only user turns contain media: in other roles, placeholders are text and media in lists are refused.  Media without
    a path take the next one of the record's columns later.  Raises UserError for invalid content.
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
    return cls(path, **_checked_settings(settings, where, frames is not None))


def listed_frames(value: list[Any], what: str) -> tuple[str, ...]:
    """The frames of a video given as a list of images.  Raises UserError; ``what`` begins its message."""
    if not value or not all(isinstance(path, str) and path for path in value):
        raise UserError(f"{what} = {shown(value)}; expected the paths of its frames, each an image.")
    return tuple(value)


def _checked_settings(settings: dict[str, Any], where: str, is_listed: bool) -> dict[str, Any]:
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
    """``refuse_key`` for a key of a message."""
    if key in _LOSS and value != (role == "assistant"):
        raise UserError(f"{where} ({role}) has {key!r} = {shown(value)}, but which turns are trained on is set for all "
                        f"samples, by mask_history and train_on_prompt in the data JSON; remove it.")
    if key in _CALLS:
        raise UserError(f"{where} ({role}) has {key!r}, but {TOOLS}; remove the calls, or the sample.")
    if key in _FILES:
        raise UserError(f"{where} ({role}) has {key!r}, which nothing reads there; give files in a column of the "
                        f"record, or as items of the message's content.")


_KEY_CHARACTERS = 80
"""Longer keys are shortened in messages."""
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""A lone surrogate, which JSON can escape but UTF-8 cannot encode."""
MESSAGES = ("messages", "conversations")
"""The usual names of the column with the conversation."""
USUAL_ATTRIBUTES = Attributes(system="system", history="history")
"""For files without a data JSON; the usual names of columns and roles are recognized too."""
_TOOL_ROLES = ("tool", "tools", "tool_call", "tool_calls", "tool_response", "function", "function_call",
               "function_response", "observation")
_TWO_COLUMNS = (("query", "response"), ("prompt", "completion"), ("question", "answer"))
"""Pairs of columns of ms-swift, TRL and others, which are read where ``attr`` names them."""


@dataclass(frozen=True)
class _Tags:
    """The keys and role names of messages."""

    role: str
    content: str
    roles: dict[str, str]
    """Role name in the data -> "user", "assistant" or "system"."""

    @classmethod
    @lru_cache
    def of(cls, attr: Attributes) -> "_Tags":
        roles = {attr.user_tag: "user", attr.assistant_tag: "assistant"}
        return cls(attr.role_tag, attr.content_tag, roles if attr.system_tag is None else
                   roles | {attr.system_tag: "system"})

    def word(self, role: str) -> str:
        """The data's name for ``role``."""
        return next((word for word, one in self.roles.items() if one == role), role)


_USUAL_TAGS = (
    _Tags("role", "content", {"user": "user", "assistant": "assistant", "system": "system"}),
    _Tags("from", "value", {"human": "user", "gpt": "assistant", "system": "system"}),
)
ChatMessage = tuple[str, Content]
"""Role and content; media from the record's columns have no path yet."""
MediaField = str | Inline | tuple[str, ...]
"""A file path, an embedded image, or the paths of a video's frames."""


def read_sample(record: Any, attr: Attributes, media: MediaRoots, where: str, is_prompt: bool = False) -> Sample:
    """``record`` as a sample with this ``where``.  Raises UserError for an invalid record.

    ``is_prompt``: the sample ends with a question; an answer after it is dropped.
    """
    if not isinstance(record, dict):
        raise UserError(f"is a {type(record).__name__}; expected an object.")
    column = _talk_column(record, attr)
    keys = unread(record, _read_keys(attr, column))
    for key in keys:
        refuse_key(key, record[key], is_prompt)
    messages, tags = _read_messages(record, attr, column)
    messages = _with_system_column(messages, record, attr)
    if is_prompt and messages[-1:] and messages[-1][0] == "assistant":
        messages = messages[:-1]
    _check_order([role for role, _ in messages], tags, is_prompt)
    coming = {kind: _column(record, getattr(attr, f"{kind}s"), kind) for kind in KINDS}
    if keys and all(isinstance(item, str) for _, content in messages for item in content):
        for key in keys:
            refuse_media_key(key, record[key])
    _check_counts(messages, coming)
    left = {kind: iter(paths) for kind, paths in coming.items()}
    return Sample(tuple(Turn(role, _filled(content, left, media)) for role, content in messages), where)


def unread_keys(record: dict[str, Any], attr: Attributes) -> list[str]:
    """The keys of a good ``record`` and its messages that nothing reads, as messages name them, each once."""
    column = _talk_column(record, attr)
    found = [(key, "") for key in unread(record, _read_keys(attr, column))]
    messages = [] if column is None else record[column]
    tags = _tags_of(messages, attr)
    for message in messages:
        if len(message) > 2:
            found += [(key, " of a message") for key in unread(message, (tags.role, tags.content)) if key not in _LOSS]
        if isinstance(message[tags.content], list):
            texts = (item for item in message[tags.content] if isinstance(item, dict) and "text" in item)
            found += [(key, " of a text") for item in texts for key in unread(item, ("type", "text"))]
    return list(dict.fromkeys(f"{key[:_KEY_CHARACTERS]!r}{where}" for key, where in found))


def num_media(record: Mapping[str, Any]) -> dict[str, int]:
    """The number of images and videos in the usual columns of a record."""
    given = {kind: record.get(f"{kind}s") or record.get(kind) or [] for kind in KINDS}
    return {kind: len(paths) if isinstance(paths, list) else 1 for kind, paths in given.items()}


@lru_cache
def _read_keys(attr: Attributes, column: str | None) -> frozenset[str]:
    """The columns of a record that are read: its conversation's ``column``, or None for Alpaca's."""
    talk = (attr.prompt, attr.query, attr.response, attr.history) if column is None else (column,)
    return frozenset(name for name in (*talk, attr.system, attr.images, attr.videos, *MEDIA) if name is not None)


def _talk_column(record: dict[str, Any], attr: Attributes) -> str | None:
    """The column with the conversation; None if there is none, so that the record has Alpaca's columns, or no talk."""
    columns = (attr.messages, *MESSAGES) if attr.formatting == "sharegpt" else ()
    return next((one for one in columns if one in record), None)


def _read_messages(record: dict[str, Any], attr: Attributes, column: str | None) -> tuple[list[ChatMessage], _Tags]:
    if column is None:
        if attr.prompt not in record or attr.response not in record:
            raise UserError(_no_talk(record, attr))
        return _alpaca(record, attr), _USUAL_TAGS[0]
    messages = record[column]
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{column!r} is {described(messages)}; expected a non-empty list of messages.")
    tags = _tags_of(messages, attr)
    return [_message(message, number, tags) for number, message in enumerate(messages)], tags


def _no_talk(record: dict[str, Any], attr: Attributes) -> str:
    """The message about a record without a conversation."""
    is_alpaca = attr.formatting == "alpaca"
    wanted = attr.messages if not is_alpaca else attr.response if attr.prompt in record else attr.prompt
    for pair in _TWO_COLUMNS:
        if all(isinstance(record.get(column), str) for column in pair):
            return f"has no {wanted!r}, but {pair[0]!r} and {pair[1]!r}: {TWO_COLUMNS}."
    usual, others = () if is_alpaca else MESSAGES, [key for key in record if key not in MEDIA]
    hint = next((found for one in (wanted, *usual) if (found := nearest(one, others))), "")
    cure = "attr.prompt and attr.response in the data JSON must name the columns" if is_alpaca else (
        f"attr.messages in the data JSON must name that column, unless it is {' or '.join(map(repr, MESSAGES))}")
    return f"has no {wanted!r}{hint}; {cure}."


def _tags_of(messages: list[Any], attr: Attributes) -> _Tags:
    """The tags that the first message has most of."""
    own = _Tags.of(attr)
    if not messages or not isinstance(messages[0], dict):
        return own
    return max((own, *_USUAL_TAGS), key=lambda one: (one.role in messages[0]) + (one.content in messages[0]))


def _message(message: Any, number: int, tags: _Tags) -> ChatMessage:
    where = f"message {number}"
    if not isinstance(message, dict) or tags.role not in message or tags.content not in message:
        raise UserError(f"{where} is {described(message)}; expected an object with {tags.role!r} and {tags.content!r} "
                        f"(role_tag and content_tag of the data JSON).")
    role = message[tags.role]
    if role in _TOOL_ROLES and role not in tags.roles:
        raise UserError(f"{where} has the role {role!r}, but {TOOLS}; remove the calls, or the sample.")
    if not isinstance(role, str) or role not in tags.roles:
        raise UserError(f"{where} has the unknown role {shown(role)}{nearest(str(role), tags.roles)}; expected one of "
                        f"{', '.join(map(shown, tags.roles))}.")
    role = tags.roles[role]
    if len(message) > 2:
        for key in unread(message, (tags.role, tags.content)):
            refuse_message_key(key, message[key], role, where)
    return role, _checked(content_of(message[tags.content], role, where, tags.content), where, role)


def _alpaca(record: dict[str, Any], attr: Attributes) -> list[ChatMessage]:
    """The pairs of the history, then the prompt with the query appended, and the response."""
    history = [] if attr.history is None else record.get(attr.history) or []
    if not isinstance(history, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
            for pair in history):
        raise UserError(f"{attr.history!r} is {described(history)}; expected a list of pairs [question, answer].")
    texts = {column: record.get(column) for column in (attr.prompt, attr.query, attr.response)}
    for column, text in texts.items():
        if not isinstance(text, str) and (text is not None or column == attr.response):
            raise UserError(f"{column!r} is {described(text)}; expected a string.")
    prompt = "\n".join(text for text in (texts[attr.prompt], texts[attr.query]) if text)
    messages: list[ChatMessage] = []
    for number, (question, answer) in enumerate([*history, (prompt, texts[attr.response])]):
        is_last = number == len(history)
        for role, text, column in (("user", question, attr.prompt), ("assistant", answer, attr.response)):
            where = repr(column) if is_last else f"pair {number} of {attr.history!r}"
            messages.append((role, _checked(content_of(text, role, where, column), where, role)))
    return messages


def _checked(content: Content, where: str, role: str) -> Content:
    """Return ``content``.  Raises UserError when it is empty, or contains a lone surrogate."""
    texts = [item for item in content if isinstance(item, str)]
    if len(texts) == len(content) and not "".join(texts).strip() and role != "system":
        raise UserError(f"has an empty {where} ({role}); give it text or remove the turn.")
    if any(HALF_CHARACTER.search(text) for text in texts):
        raise UserError(f"{where} contains half of a surrogate pair, which is not a character; repair the text.")
    return content


def _with_system_column(messages: list[ChatMessage], record: dict[str, Any], attr: Attributes) -> list[ChatMessage]:
    """Put the system column first.  An empty system text counts as absent: the chat template's default applies."""
    system = record.get(attr.system) if attr.system is not None else None
    if system is not None and not isinstance(system, str):
        raise UserError(f"{attr.system!r} is {described(system)}; expected a string or null.")
    if system:
        if messages[0][0] == "system":
            raise UserError(f"has a system message and {attr.system!r} too; remove one of them.")
        messages = [("system", _checked((system,), repr(attr.system), "system")), *messages]
    return messages[1:] if messages[0] == ("system", ()) else messages


def _check_order(roles: list[str], tags: _Tags, is_prompt: bool) -> None:
    if roles and roles[0] == "system":
        roles = roles[1:]
    for number, role in enumerate(roles):
        expected = ("user", "assistant")[number % 2]
        if role != expected:
            raise UserError(
                f"turn {number} is by {tags.word(role)!r}; expected {tags.word(expected)!r}: turns alternate, starting "
                f"with {tags.word('user')!r}, and only the first message may be by the system.")
    if is_prompt:
        if len(roles) % 2 == 0:
            raise UserError(f"does not end with a turn by {tags.word('user')!r}; there is nothing to answer.")
    elif len(roles) % 2 or not roles:
        raise UserError(f"does not end with a turn by {tags.word('assistant')!r}; there is nothing to learn from it.")


def _column(record: dict[str, Any], named: str | None, kind: str) -> list[MediaField]:
    """The record's column of images or videos.  A list inside the video column is the frames of one video."""
    known = [name for name in dict.fromkeys((named, f"{kind}s", kind)) if name is not None]
    given = [name for name in known if record.get(name) not in (None, [], "")]
    if len(given) > 1:
        raise UserError(f"has {' and '.join(map(repr, given))}; keep one of them.")
    if not given:
        return []
    paths = record[given[0]]
    paths = [paths] if isinstance(paths, str | Inline) else paths
    if kind == "video" and isinstance(paths, list):
        paths = [listed_frames(path, f"{given[0]!r} has a video") if isinstance(path, list) else path for path in paths]
    if not isinstance(paths, list) or not all(isinstance(path, str | Inline | tuple) and path for path in paths):
        raise UserError(f"{given[0]!r} is {shown(paths)}; expected a list of paths, one path, or null.")
    return paths


def _check_counts(messages: list[ChatMessage], coming: Mapping[str, list[MediaField]]) -> None:
    media = [item for _, content in messages for item in content if not isinstance(item, str)]
    for kind, cls in KINDS.items():
        num_places, num = sum(isinstance(item, cls) and not item.path for item in media), len(coming[kind])
        if num_places != num:
            raise UserError(f"has {num_places} {cls.placeholder} in its messages but {counted(num, kind)}; "
                            f"expected one {cls.placeholder} where each {kind} belongs.")


def _filled(content: Content, coming: Mapping[str, Iterator[MediaField]], media: MediaRoots) -> Content:
    """``content`` with located media; those without a path take the next one of the record's columns."""
    filled: list[str | Media] = []
    for item in content:
        if not isinstance(item, str):
            path = item.path or next(coming[item.kind])
            if isinstance(path, Inline) and not isinstance(item, Image):
                raise UserError(f"{item.kind} {path} is embedded in the record, which only images may be; write it to "
                                f"a file and give its path.")
            found = path if isinstance(path, Inline) else media.find(path, item.kind) if isinstance(path, str) else (
                tuple(media.find(str(one), "image") for one in path))
            item = replace(item, path=found)
        filled.append(item)
    return tuple(filled)
