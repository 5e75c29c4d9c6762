"""Raw JSON or JSONL files as validated samples: turns of text, and the paths of the images in it.

The column names come from the data JSON (``attr``), which follows LLaMA-Factory's sharegpt form, as in MindSpeed-MM.
Every sample is checked once, up front, so that a bad one stops the run before it starts and not at step 5000.
"""

import os
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from mm.config.data import Attributes, DataConfig
from mm.data.records import RecordFile, Version, read_record
from mm.errors import UserError, collected, nearest

IMAGE_PLACEHOLDER = "<image>"
_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_PROBLEMS = 20
_SKIP_HINT = " (--bad-sample skip leaves such samples out, and lists them in a file.)"


@dataclass(frozen=True)
class Turn:
    """What one side says.  ``role`` is "system", "user" or "assistant"; only user turns hold image placeholders."""

    role: str
    text: str


@dataclass(frozen=True)
class Sample:
    """An optional system message, then user and assistant turns in alternation, ending with an assistant's."""

    turns: tuple[Turn, ...]
    image_paths: tuple[str, ...]
    """One for each placeholder, in reading order; they exist on this machine."""
    source: str
    """``file:index``, the index counted from 0 within the file."""


class Dataset:
    """All samples of ``config.dataset``, in file order, read from disk one at a time.

    Holds only where each sample lies in its file (32 bytes a sample), so it pickles cheaply into data workers.
    ``config.max_samples`` keeps that many of the first samples of all files together.
    """

    def __init__(self, config: DataConfig, skips_bad: bool = False) -> None:
        """Read and check every sample; of images only that the file is there.

        Raises UserError with up to 20 problems, each naming file, line and sample.  With ``skips_bad`` samples that
        cannot be used are left out, and only a file that cannot be read, or no good sample at all, is an error.
        """
        self._config = config
        self.skipped: list[str] = []
        """Why each sample was left out."""
        self._files: list[tuple[str, Version]] = []
        spans: list[np.ndarray] = []
        problems: list[str] = []
        for path in config.dataset:
            wanted = None if config.max_samples is None else config.max_samples - sum(map(len, spans))
            if wanted == 0 or len(problems) >= MAX_PROBLEMS:
                break
            with collected(problems):
                file = RecordFile(path)
                bad = self.skipped if skips_bad else problems
                spans.append(_check_file(file, len(self._files), wanted, config, problems, bad))
                self._files.append((path, file.version))
        if not problems and not sum(map(len, spans)):
            problems = self.skipped or problems
        if problems:
            more = ["More problems may follow; mend these first."] if len(problems) >= MAX_PROBLEMS else []
            raise UserError(problems[:MAX_PROBLEMS] + more)
        self._spans = np.concatenate(spans)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``.  Raises UserError when its file was changed after the check."""
        number, index_in_file, start, end = (int(value) for value in self._spans[index])
        path, version = self._files[number]
        source = f"{path}:{index_in_file}"
        record = read_record(path, version, start, end)
        try:
            return _sample(record, self._config, source)
        except UserError as error:
            raise UserError(f"{source}: {problem}" for problem in error.problems) from error


def _check_file(
    file: RecordFile, number: int, wanted: int | None, config: DataConfig, problems: list[str], bad: list[str]
) -> np.ndarray:
    """Check the first ``wanted`` samples (None: all), appending what is wrong with the file to ``problems``.

    What is wrong with a sample goes to ``bad``, which may be the same list: with another one, the sample is left out.
    Returns int64 [num_samples, 4]: number of the file, index in it, first byte, end byte.
    """
    kept, positions, num_before, index = [], [], len(problems), -1
    for index, (start, end, record) in enumerate(file.records(problems)):
        found: list[str] = []
        with collected(found, f"{file.path}:{file.line(start)}: sample {index} (counted from 0): "):
            _sample(record, config, f"{file.path}:{index}")
        if found and bad is problems and not any(_SKIP_HINT in problem for problem in problems):
            found[0] += _SKIP_HINT
        bad += found
        if not found:
            kept.append(index)
            positions += [start, end]
        if len(problems) >= MAX_PROBLEMS or len(kept) == wanted:
            break
    if index < 0 and len(problems) == num_before:
        problems.append(f"{file.path}: holds no sample; expected a JSON list of objects, or one JSON object a line.")
    offsets = np.array(file.byte_offsets(positions), dtype=np.int64).reshape(-1, 2)
    numbers = np.full(len(offsets), number, dtype=np.int64)
    return np.column_stack([numbers, np.array(kept, dtype=np.int64), offsets])


def _sample(record: Any, config: DataConfig, source: str) -> Sample:
    """Read the columns of one raw sample.  Raises UserError without saying which sample it was."""
    attr = config.attr
    if not isinstance(record, dict):
        raise UserError(f"is a {type(record).__name__}; expected an object with key {attr.messages!r}.")
    for column in ("videos", "audios"):
        if record.get(column):
            raise UserError(f"has {column!r}, which this version does not support; remove it or the sample.")
    if attr.messages not in record:
        hint = nearest(attr.messages, record)
        raise UserError(f"has no {attr.messages!r}{hint}; attr.messages in the data JSON names that column.")
    messages = record[attr.messages]
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{attr.messages!r} is {_shown(messages)}; expected a list of messages that is not empty.")
    turns = [_turn(message, number, attr) for number, message in enumerate(messages)]
    turns = _with_system_column(turns, record, attr)
    _check_order(turns, attr)
    images = _images(record, config)
    num_placeholders = sum(turn.text.count(IMAGE_PLACEHOLDER) for turn in turns if turn.role == "user")
    if num_placeholders != len(images):
        raise UserError(
            f"has {num_placeholders} {IMAGE_PLACEHOLDER} in its messages but {len(images)} images; remove or add some."
        )
    return Sample(tuple(turns), tuple(images), source)


def _turn(message: Any, number: int, attr: Attributes) -> Turn:
    if not isinstance(message, dict) or attr.role_tag not in message or attr.content_tag not in message:
        raise UserError(
            f"message {number} is {_shown(message)}; expected an object with {attr.role_tag!r} and "
            f"{attr.content_tag!r} (role_tag and content_tag of the data JSON)."
        )
    roles = {attr.user_tag: "user", attr.assistant_tag: "assistant"}
    if attr.system_tag is not None:
        roles[attr.system_tag] = "system"
    role, text = message[attr.role_tag], message[attr.content_tag]
    if not isinstance(role, str) or role not in roles:
        raise UserError(
            f"message {number} has the unknown role {_shown(role)}{nearest(str(role), roles)}; expected one of "
            f"{', '.join(map(repr, roles))}."
        )
    if not isinstance(text, str):
        raise UserError(
            f"message {number} has {attr.content_tag!r} = {_shown(text)}; expected a string, images being marked by "
            f"{IMAGE_PLACEHOLDER} in it."
        )
    _check_text(text, f"message {number}", roles[role])
    return Turn(roles[role], text)


def _check_text(text: str, where: str, role: str) -> None:
    if not text.strip() and role != "system":
        raise UserError(f"has an empty {where} ({role}); give it text or remove the turn.")
    if "<video>" in text:
        raise UserError(f"{where} holds '<video>'; video is not supported by this version: remove the sample.")
    if _SURROGATE.search(text):
        raise UserError(f"{where} holds half of a surrogate pair, which is no character; repair the text.")


def _with_system_column(turns: list[Turn], record: dict[str, Any], attr: Attributes) -> list[Turn]:
    """Put the system column in front.  An empty system text counts as none: the chat template's default applies."""
    system = record.get(attr.system) if attr.system is not None else None
    if system is not None and not isinstance(system, str):
        raise UserError(f"{attr.system!r} is {_shown(system)}; expected a string or null.")
    if system:
        _check_text(system, repr(attr.system), "system")
        if turns[0].role == "system":
            raise UserError(f"has a system message and {attr.system!r} too; remove one of them.")
        turns = [Turn("system", system), *turns]
    return turns[1:] if turns[0] == Turn("system", "") else turns


def _check_order(turns: list[Turn], attr: Attributes) -> None:
    if turns and turns[0].role == "system":
        turns = turns[1:]
    tags = {"user": attr.user_tag, "assistant": attr.assistant_tag, "system": attr.system_tag}
    for number, turn in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if turn.role != expected:
            raise UserError(
                f"turn {number} is of {tags[turn.role]!r}; expected {tags[expected]!r}: turns alternate, beginning "
                f"with {tags['user']!r}, and only the first message may be the system's."
            )
    if len(turns) % 2 or not turns:
        raise UserError(f"ends without a turn of {tags['assistant']!r}; there is nothing to learn from it.")


def _images(record: dict[str, Any], config: DataConfig) -> list[str]:
    """Paths of the sample's images, on this machine."""
    column = config.attr.images
    if column is None:
        if record.get("images"):
            raise UserError("has 'images', but the data JSON names no image column; set attr.images to 'images'.")
        return []
    images = record.get(column)
    if images is None:
        return []
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(image, str) and image for image in images):
        raise UserError(f"{column!r} is {_shown(images)}; expected a list of paths, one path, or null.")
    return [_local_path(image, config.dataset_dir) for image in images]


def _local_path(path: str, directory: str) -> str:
    """``path`` below ``directory`` when that exists, else as it is: LLaMA-Factory's rule."""
    if "://" in path or path.startswith("data:"):
        raise UserError(f"image {path[:80]!r} is not a local path; download it and give the path of the file.")
    joined = os.path.join(directory, path)
    for candidate in (joined, path):
        if os.path.isfile(candidate):
            return candidate
    raise UserError(f"image {path!r} is no regular file, neither as {joined!r} nor as it is; check dataset_dir.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
