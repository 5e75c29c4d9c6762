"""Raw JSON or JSONL files as validated samples: turns of text, and the paths of the images in it.

The column names come from the data JSON (``attr``), which follows LLaMA-Factory's sharegpt form, as in MindSpeed-MM.
Every sample is checked once, up front, so that a bad one stops the run before it starts and not at step 5000.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from mm.config.data import Attributes, DataConfig
from mm.data.quarantine import BadSample
from mm.data.records import RecordFile, Version, line_of, read_record
from mm.data.sample import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, Image, Sample, Turn
from mm.errors import UserError, collected, nearest

_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_PROBLEMS = 20
_SKIP_HINT = " (--bad-sample skip leaves such samples out, and lists them in a file.)"


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


    def bad_sample(self, index: int, error: UserError) -> BadSample:
        """What is told of sample ``index``, which cannot be used because of ``error``."""
        number, index_in_file, start, end = (int(value) for value in self._spans[index])
        path, version = self._files[number]
        name, media = None, ()
        with suppress(UserError):  # where the file itself is what has changed
            record = read_record(path, version, start, end)
            name, media = record.get("id"), _sample(record, self._config, "").media
        reason = error.problems[0].removeprefix(f"{path}:{index_in_file}: ")
        return BadSample(path, line_of(path, start), index_in_file, name if isinstance(name, str | int) else None,
                         next((item.path for item in media if item.path in reason), None), reason)


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
    said = [_said(message, number, attr) for number, message in enumerate(messages)]
    said = _with_system_column(said, record, attr)
    _check_order([role for role, _ in said], attr)
    images = _images(record, config)
    num_placeholders = sum(text.count(IMAGE_PLACEHOLDER) for role, text in said if role == "user")
    if num_placeholders != len(images):
        raise UserError(
            f"has {num_placeholders} {IMAGE_PLACEHOLDER} in its messages but {len(images)} images; remove or add some."
        )
    coming = iter(images)
    return Sample(tuple(Turn(role, _parts(text, coming) if role == "user" else (text,)) for role, text in said), source)


def _parts(text: str, images: Iterator[str]) -> tuple[str | Image, ...]:
    """A user's text with the coming images in place of its placeholders."""
    return tuple(Image(next(images)) if piece == IMAGE_PLACEHOLDER else piece
                 for piece in re.split(f"({IMAGE_PLACEHOLDER})", text) if piece)


Said = tuple[str, str]
"""Role and text, with placeholders."""


def _said(message: Any, number: int, attr: Attributes) -> Said:
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
    return roles[role], text


def _check_text(text: str, where: str, role: str) -> None:
    if not text.strip() and role != "system":
        raise UserError(f"has an empty {where} ({role}); give it text or remove the turn.")
    if VIDEO_PLACEHOLDER in text:
        raise UserError(
            f"{where} holds {VIDEO_PLACEHOLDER!r}; video is not supported by this version: remove the sample.")
    if _SURROGATE.search(text):
        raise UserError(f"{where} holds half of a surrogate pair, which is no character; repair the text.")


def _with_system_column(said: list[Said], record: dict[str, Any], attr: Attributes) -> list[Said]:
    """Put the system column in front.  An empty system text counts as none: the chat template's default applies."""
    system = record.get(attr.system) if attr.system is not None else None
    if system is not None and not isinstance(system, str):
        raise UserError(f"{attr.system!r} is {_shown(system)}; expected a string or null.")
    if system:
        _check_text(system, repr(attr.system), "system")
        if said[0][0] == "system":
            raise UserError(f"has a system message and {attr.system!r} too; remove one of them.")
        said = [("system", system), *said]
    return said[1:] if said[0] == ("system", "") else said


def _check_order(roles: list[str], attr: Attributes) -> None:
    if roles and roles[0] == "system":
        roles = roles[1:]
    tags = {"user": attr.user_tag, "assistant": attr.assistant_tag, "system": attr.system_tag}
    for number, role in enumerate(roles):
        expected = ("user", "assistant")[number % 2]
        if role != expected:
            raise UserError(
                f"turn {number} is of {tags[role]!r}; expected {tags[expected]!r}: turns alternate, beginning "
                f"with {tags['user']!r}, and only the first message may be the system's."
            )
    if len(roles) % 2 or not roles:
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
