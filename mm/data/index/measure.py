"""Measures samples as they will be after encoding, from the headers of their media, without decoding.

The encoder itself renders, tokenizes and truncates the text, as in training.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from mm.batch import IGNORE_INDEX, Grid, image_pairs, window_pairs
from mm.config.data import DataConfig
from mm.config.model import ModelConfig
from mm.console import ongoing
from mm.data.encode.encoder import SampleEncoder
from mm.data.sample import Media, Sample
from mm.errors import UserError
from mm.families import FAMILIES
from mm.families.family import Family
from mm.model.arithmetic import Arithmetic
from mm.process import is_first_rank

ROW = np.dtype([
    ("start", "<i8"), ("end", "<i8"), ("num_image_pairs", "<i8"), ("num_window_pairs", "<i8"), ("line", "<i4"),
    ("num_tokens", "<i4"), ("num_target_tokens", "<i4"), ("num_media", "<i4"), ("num_patches", "<i4"),
    ("num_dropped_tokens", "<i4"),
])  # fmt: skip
"""The columns that the index has for each record: its ``mm.data.records.records.Span``, its ``Lengths``, and the tokens
that truncation dropped.  ``num_tokens`` is 0 if nothing was measured, ``BAD`` if the record cannot be used, and
``TOO_LONG`` if nothing of it would remain; then the dropped tokens are ``TooLongError.num_tokens``."""
BAD, TOO_LONG = -1, -2
_BOX = re.compile("|".join((
    *(rf"{re.escape(family.tokens.box_start)}([^<]*){re.escape(family.tokens.box_end)}" for family in FAMILIES),
    r"\"(?:bbox_2d|point_2d)\"\s*:\s*\[([^\]]*)\]")))
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def is_usable(num_tokens: np.ndarray) -> np.ndarray:
    """bool: which records can be trained on, given ``ROW``'s ``num_tokens``."""
    return num_tokens >= 0


@dataclass(frozen=True)
class Gauge:
    """Measures samples as ``encoder`` would encode them."""

    encoder: SampleEncoder
    window: int
    """Patches along each side of an attention window of the ViT."""

    @classmethod
    def from_config(cls, data: DataConfig, model: ModelConfig, seq_length: int) -> "Gauge":
        """Raises UserError as ``SampleEncoder.from_config`` does."""
        with ongoing("reading tokenizer and processor", is_first_rank()):
            encoder = SampleEncoder.from_config(data, model, seq_length)
        return cls(encoder, model.vision.window_attn_size // model.vision.patch_size)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that its results depend on besides the samples."""
        return hashlib.sha256(json.dumps(_facts(self)).encode()).hexdigest()


def _facts(value: Any) -> Any:
    """The facts about a part of the encoder that matter, as JSON values."""
    if isinstance(value, PreTrainedTokenizerBase):
        backend: Any = value.backend_tokenizer  # ``load_tokenizer`` requires a fast tokenizer
        code = hashlib.sha256(backend.to_str().encode()).hexdigest()
        return [code, value.chat_template, transformers.__version__, tokenizers.__version__]
    if isinstance(value, DataConfig):  # only the settings that plan videos; other parts cover the rest
        names = ("image_resize", *(field.name for field in fields(value) if field.name.startswith("video_")))
        return {name: getattr(value, name) for name in names if name not in ("video_backend", "video_timeout")}
    if is_dataclass(value):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        # What a family fixes follows from the tokenizer, and its positions change no length.
        return {name: _facts(item) for name, item in values.items() if not isinstance(item, Family | Arithmetic)}
    return value


def sample_lengths(
    gauge: Gauge, sample: Sample, known: dict[Media, Grid]
) -> tuple[dict[str, int], int, tuple[Grid, ...]]:
    """The columns of ``ROW`` that depend on the encoder, the number of words like control tokens, and the grids of all
    media, in order.

    ``known`` caches grids across samples.  Raises UserError for media that cannot be read and for samples without any
    target left, and TooLongError where whole turns are dropped and none would remain.
    """
    encoder = gauge.encoder
    for item in sample.media:
        if item.files == item.contents and item not in known:  # embedded images would fill the memory
            known[item] = encoder.planned(item).grid
    grids = tuple(known[item] if item in known else encoder.planned(item).grid for item in sample.media)
    text = encoder.chat.encode(sample.turns, grids)
    num_targets = int((text.labels != IGNORE_INDEX).sum())
    kept = [grids[number] for number in text.media]
    _check(gauge, grids, num_targets)
    return {
        "num_tokens": len(text.token_ids),
        "num_target_tokens": num_targets,
        "num_media": len(kept),
        "num_patches": sum(map(math.prod, kept)),
        "num_image_pairs": sum(map(image_pairs, kept)),
        "num_window_pairs": sum(window_pairs(grid, gauge.window) for grid in kept),
        "num_dropped_tokens": text.num_dropped_tokens,
    }, text.num_control_words, grids


def _check(gauge: Gauge, grids: tuple[Grid, ...], num_targets: int) -> None:
    """Refuse a sample whose media alone are too long, or that has no target tokens left."""
    chat = gauge.encoder.chat
    limit, num_visual = chat.seq_length, sum(math.prod(grid) // chat.spatial_merge_size**2 for grid in grids)
    if num_visual > limit and not chat.drops_turns:
        raise UserError(
            f"its images and videos ({len(grids)}) alone take {num_visual} tokens, which exceeds --seq-length {limit}, "
            f"and images are never cut; use fewer or smaller ones (image_max_pixels, video_max_pixels), or raise "
            f"--seq-length above {num_visual}.")
    if num_targets == 0:
        raise UserError(
            f"none of its answer tokens remain after truncation to --seq-length {limit}; shorten the sample, or raise "
            f"--seq-length.")


def has_boxes_outside(sample: Sample, grids: tuple[Grid, ...], patch_size: int) -> bool:
    """Whether an answer contains coordinates outside all images as the model sees them: a sign that coordinates of
    the original files were kept although the images are resized.  The model uses pixels of the resized image."""
    largest = max((max(grid[1:]) * patch_size for grid in grids), default=0)
    if not largest:
        return False
    answers = (turn.text for turn in sample.turns if turn.role == "assistant")
    places = (box[box.lastindex or 0] for answer in answers for box in _BOX.finditer(answer))
    return any(float(number) > largest for place in places for number in _NUMBER.findall(place))
