"""Keys of records and messages that nothing here reads.

Those with which another trainer would learn something else are refused.  Known metadata are ignored silently, and
``unread`` names all others for a note.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mm.config.schema import shown
from mm.config.unsupported import AUDIO, PREFERENCES, TOOLS
from mm.data.sample import KINDS, Inline
from mm.errors import UserError

MEDIA = ("image", "images", "video", "videos")
"""The usual names of the columns with media."""
_MISSPELT = 0.8
"""Similarity from which a key counts as a misspelling of one: ``imgae``, but not ``image_id`` or ``image_dir``."""
_PATHS = {"img": "image", "imgs": "images", **{
    f"{kind}_{what}{s}": f"{kind}{s}" for kind in KINDS for what in ("path", "file", "url") for s in ("", "s")}}
"""Other names of these columns."""


@dataclass(frozen=True)
class _Refused:
    """Why a key is refused, and what to do."""

    why: str
    cure: str
    is_answer: bool = False
    """Whether it is about the answer, so a prompt may have it."""
    types: type | tuple[type, ...] = object
    """Values of other types are metadata."""


_PAIRS = _Refused(f"it is part of a preference pair (DPO), and {PREFERENCES}", "keep one answer, in the conversation",
                  is_answer=True)
_KTO = _Refused(f"it marks a good or bad answer (KTO), and {PREFERENCES}", "remove bad answers, then the key",
                is_answer=True, types=bool)
_TOOLS = _Refused(f"it describes tools, and {TOOLS}", "remove it together with all calls")
_CONTRAST = _Refused("it is for training embeddings in ms-swift", "remove it", is_answer=True)
_REFUSED: Mapping[str, _Refused] = {
    **dict.fromkeys(("audio", "audios"), _Refused(AUDIO, "remove it or the sample")),
    "objects": _Refused("ms-swift's grounding puts its boxes into the text, in place of <bbox> and <ref-object>",
                        "write them into the text, in pixels of the resized image"),
    **dict.fromkeys(("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_images"), _PAIRS),
    **dict.fromkeys(("label", "kto_tag"), _KTO),
    **dict.fromkeys(("tools", "functions"), _TOOLS),
    **dict.fromkeys(("positive_messages", "negative_messages"), _CONTRAST),
    "system": _Refused("attr.system in the data JSON does not name it", "set attr.system to \"system\", or remove it"),
    "history": _Refused("only alpaca's form has it, where attr.history in the data JSON names it",
                        "set attr.history to \"history\", or remove it"),
}
"""Keys of a record."""

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
    if (row := _REFUSED.get(key)) is not None and isinstance(value, row.types) and not (is_prompt and row.is_answer):
        raise UserError(f"has {key!r}, which this version does not support: {row.why}; {row.cure}.")


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
