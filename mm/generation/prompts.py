"""Prompts from a file, the command line or the terminal.

A record of a file is a conversation in any form that the trainer reads, ending with a question, or simply
``{"prompt": TEXT, "images": [...], "videos": [...], "system": TEXT}``.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mm.config.generate import Asking
from mm.config.model import ModelConfig
from mm.data.encode import SampleEncoder
from mm.data.records.formats import MESSAGES, USUAL_ATTRIBUTES, content_of, num_media, read_sample, with_places
from mm.data.records.records import open_records
from mm.data.records.roots import MediaRoots
from mm.data.sample import Image, Inline, Media, Sample, Turn, Video, name_of, numbered
from mm.errors import UserError, collected, counted, refuse


@dataclass(frozen=True)
class Prompt:
    """One question and the turns before it."""

    number: int
    """Counted from 0: the index of its record in the file."""
    sample: Sample
    name: str | int | None = None
    """The record's own ``id``."""

    @property
    def question(self) -> str:
        return self.sample.turns[-1].text

    @cached_property
    def digest(self) -> str:
        """Digest of its turns, with the bytes of embedded images."""
        embedded = (one.digest for media in self.sample.media for one in media.contents if isinstance(one, Inline))
        return hashlib.sha256(repr((self.sample.turns, *embedded)).encode()).hexdigest()


def read_prompts(path: str, media_roots: Sequence[str]) -> tuple[list[Prompt], list[str]]:
    """The valid prompts of a file, and the problems of other records, each with file and line."""
    media = MediaRoots.beside(os.path.abspath(path), tuple(media_roots))
    prompts: list[Prompt] = []
    problems: list[str] = []
    unreadable: list[str] = []
    file, num_records = open_records(path), 0
    for raw in file.records(unreadable):
        num_records += 1
        where = file.where(raw)
        with collected(problems, f"{where}: {numbered('prompt', raw.index, name_of(raw.value))} "):
            if raw.problem is not None:
                raise UserError(raw.problem)
            sample = read_sample(_conversation(raw.value), USUAL_ATTRIBUTES, media, where, is_prompt=True)
            prompts.append(Prompt(raw.index, sample, name_of(raw.value)))
    if unreadable or not num_records:
        raise UserError(unreadable or f"{path}: has no prompts; expected a JSON list of objects, or one per line.")
    return prompts, problems


def encoder_for_prompts(encoder: SampleEncoder, model: ModelConfig) -> SampleEncoder:
    """``encoder``, of training samples, for prompts, which may take all positions of ``model``."""
    return replace(encoder, chat=replace(encoder.chat, seq_length=model.language.max_position_embeddings))


def _conversation(record: Any) -> Any:
    """Turn a record with only a prompt into one with messages; others are returned unchanged."""
    if not isinstance(record, dict):
        return record
    if "instruction" in record and "output" not in record:
        return {**record, "output": "-"}  # a placeholder for the answer, which is dropped
    if not isinstance(text := record.get("prompt"), str) or set(MESSAGES) & record.keys():
        return record
    return {**record, "messages": [{"role": "user", "content": with_places(text, num_media(record))}]}


def question(text: str, images: Sequence[str], videos: Sequence[str], *, media_last: bool = False) -> Turn:
    """A question with files that the user names, anywhere on this machine.

    ``media_last``: if the text has no placeholders, media come after it, as in MindSpeed-MM's pipeline.
    """
    given: dict[type[Media], Sequence[str]] = {Image: images, Video: videos}
    problems = [f"{cls.kind} {path!r} is not a regular file; give the path of an existing file"
                for cls, paths in given.items() for path in paths if not os.path.isfile(path)]
    placed = with_places(text, {cls.kind: len(paths) for cls, paths in given.items()})
    if media_last and placed.endswith(text):
        placed = text + placed.removesuffix(text)
    content = content_of(placed, "user", "the question", "prompt")
    for cls, paths in given.items():
        places = sum(isinstance(item, cls) for item in content)
        if places != len(paths):
            problems.append(f"the question has {places} {cls.placeholder} but {counted(len(paths), cls.kind)}; the "
                            f"numbers must be equal")
    if not text.strip() and not images and not videos:
        problems.append("the question is empty; give it text, an image or a video")
    refuse(problems)
    coming = {cls: iter(paths) for cls, paths in given.items()}
    return Turn("user", tuple(item if isinstance(item, str) else replace(item, path=next(coming[type(item)]))
                              for item in content))


def prompt_of(asking: Asking) -> Sample:
    """The prompt of the flags; without ``--prompt`` that of the inference JSON, whose media the flags replace."""
    args, inference = asking.args, asking.inference
    text, images, videos = args.prompt or "", args.image, args.video
    media_last = False
    if args.prompt is None and inference is not None and inference.prompts is not None:
        text, media_last = inference.prompts, True
        if not images and not videos:
            images, videos = ((path,) if path else () for path in (inference.image_path, inference.video_path))
    asked = question(text, images, videos, media_last=media_last)
    return Sample((asked,) if args.system is None else (Turn("system", (args.system,)), asked), "the question")
