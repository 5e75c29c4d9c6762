"""One raw record of any format as a ``Sample``: ShareGPT, MindSpeed-MM, LLaVA, OpenAI, Qwen or Alpaca.

Columns, roles and placeholders come from ``Attributes``; a record without these is searched for the usual names.
Messages here say what is wrong with a record; the caller adds its place.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mm.config.data import Attributes
from mm.config.mindspeed import TOOLS, TWO_COLUMNS
from mm.config.schema import shown
from mm.data.records.content import (
    MEDIA,
    Content,
    content_of,
    listed_frames,
    refuse_key,
    refuse_media_key,
    refuse_message_key,
    unread,
    unread_of_message,
)
from mm.data.records.record_name import described
from mm.data.records.roots import MediaRoots
from mm.data.sample import KINDS, Image, Inline, Media, Sample, Turn
from mm.errors import UserError, counted, nearest

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
    """The keys of a good ``record`` and its messages that nothing reads, as messages name them, each once.

    None of them is known to matter, or to be metadata.
    """
    column = _talk_column(record, attr)
    found = [(key, "") for key in unread(record, _read_keys(attr, column))]
    messages = [] if column is None else record[column]
    tags = _tags_of(messages, attr)
    for message in messages:
        if len(message) > 2:
            found += [(key, " of a message") for key in unread_of_message(message, (tags.role, tags.content))]
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
