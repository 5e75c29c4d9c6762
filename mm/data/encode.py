"""Samples as tensors: each one a microbatch with one segment, ready to be packed with others.

The checkpoint's own chat template renders the text, which is tokenized once as a whole, so token ids equal those of
transformers.  Targets are those of LLaMA-Factory and MindSpeed-MM: each answer, the token after it that ends the turn,
and the newline after that.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mm.batch import IGNORE_INDEX, Grid, Microbatch
from mm.config.data import DataConfig, ResizeRule
from mm.config.model import ModelConfig
from mm.config.parse import read_json
from mm.data.media.image_patches import ImagePlan, ImageProcessor
from mm.data.media.video_patches import VideoPlan, VideoProcessor
from mm.data.records.formats import HALF_CHARACTER
from mm.data.sample import KINDS, Image, Media, Sample, Turn, Video
from mm.errors import UserError, naming, refuse
from mm.families import FAMILIES
from mm.families.family import Family
from mm.model.arithmetic import Arithmetic, VideoTimes
from mm.model.families import arithmetic_of


def kept_lengths(
    lengths: Sequence[tuple[int, int]], limit: int, last_first: bool = False
) -> list[tuple[int, int]]:
    """How many tokens of the question and answer of each turn to keep, at most ``limit`` in total.

    LLaMA-Factory's rule (its ``infer_seqlen``): turns take what they need, from the first one on or from the last one
    back.  In the turn that does not fit, the longer part is cut, or both in proportion if each takes more than half.
    """
    kept = [(0, 0)] * len(lengths)
    for turn in reversed(range(len(lengths))) if last_first else range(len(lengths)):
        question, answer = lengths[turn]
        if 2 * answer < limit:
            num_answer = answer
        elif 2 * question < limit:
            num_answer = min(answer, limit - question)
        else:
            num_answer = min(answer, int(limit * (answer / (question + answer))))
        kept[turn] = min(question, limit - num_answer), num_answer
        limit -= sum(kept[turn])
    return kept


_MASKS = [chr(code) for code in range(0xE000, 0xF8FF)]
"""Private-use characters.  One that no message contains replaces control tokens in the template."""


def load_tokenizer(directory: str, families: Sequence[Family] = FAMILIES) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory, with its chat template.

    The template comes from ``processor_config.json``, else ``chat_template.json``, else ``chat_template.jinja``, else
    the tokenizer itself, which is the order of transformers' processor.  Raises UserError when the directory lacks a
    tokenizer, a template or the control tokens of each of ``families``.
    """
    path = Path(directory)
    if not path.is_dir():
        raise UserError(f"model_name_or_path = {directory!r} is not a directory; give a local Hugging Face checkpoint.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # many types on broken files
        raise UserError(f"{directory}: cannot load its tokenizer: {error}") from error
    # These take precedence over the tokenizer's own template and chat_template.jinja, which are loaded already.
    for name in ("processor_config.json", "chat_template.json"):
        document = read_json(path / name) if (path / name).is_file() else None
        if document is not None and document.get("chat_template") is not None:
            tokenizer.chat_template = document.get("chat_template")
            break
    problems = []
    if not isinstance(tokenizer.chat_template, str):
        problems.append(f"{directory}: has no chat template; copy chat_template.json from the published checkpoint.")
    if not tokenizer.is_fast:
        problems.append(f"{directory}: has no fast tokenizer; copy tokenizer.json from the published checkpoint.")
    vocabulary = tokenizer.get_vocab()
    lacking = [(family, [token for token in family.tokens.needed if token not in vocabulary]) for family in families]
    family, tokens = min(lacking, key=lambda found: len(found[1]))
    problems += [f"{directory}: its tokenizer has no token {token}; copy tokenizer.json from a {family.title} "
                 f"checkpoint." for token in tokens]
    refuse(problems)
    return tokenizer


class TooLongError(UserError):
    """A sample in which not even one question and its answer fit."""

    num_tokens = 0
    """Tokens of its system turn and that question and answer."""


@dataclass(frozen=True)
class EncodedText:
    """Token ids int64 [num_tokens], labels int64 [num_tokens], and which images and videos remain."""

    token_ids: Tensor
    labels: Tensor
    media: tuple[int, ...]
    """Indices of the remaining ones, counted from 0 in reading order."""
    num_dropped_tokens: int
    num_dropped_turns: int
    """Turns (a question with its answer) of which nothing remains."""
    num_control_words: int
    """Control tokens that occur in messages, where they are plain text."""


@dataclass(frozen=True)
class ChatEncoder:
    """Renders, tokenizes, labels and truncates conversations."""

    tokenizer: PreTrainedTokenizerBase
    seq_length: int
    """Longer samples are truncated to this many tokens."""
    spatial_merge_size: int
    family: Family
    train_on_prompt: bool = False
    """Compute the loss on all tokens."""
    mask_history: bool = False
    """Compute the loss on the last answer only; in a long conversation, keep the last turns."""
    drops_turns: bool = False
    """Truncate by whole turns instead of by LLaMA-Factory's rule."""

    @cached_property
    def _turn(self) -> re.Pattern[str]:
        """Matches a rendered turn: role, text, end.  Matches nothing inside texts, where these tokens are masked."""
        tokens = self.family.tokens
        return re.compile(rf"{re.escape(tokens.turn_start)}([^\n]*)\n(.*?)({re.escape(tokens.turn_end)}\n?)", re.DOTALL)

    @cached_property
    def _control(self) -> re.Pattern[str]:
        """Matches the tokens that delimit turns and media.  Inside a message they are plain text.  Content tokens, such
        as those around a box, are not included."""
        return re.compile("|".join(map(re.escape, (*self.family.tokens.needed, *self.family.tokens.others))))

    @cached_property
    def image_token_id(self) -> int:
        return self.tokenizer.get_vocab()[self.family.tokens.image]

    @cached_property
    def video_token_id(self) -> int:
        return self.tokenizer.get_vocab()[self.family.tokens.video]

    @cached_property
    def vision_start_token_id(self) -> int:
        return self.tokenizer.get_vocab()[self.family.tokens.vision_start]

    def encode(self, turns: Sequence[Turn], grids: Sequence[Grid]) -> EncodedText:
        """Encode a conversation whose images and videos have ``grids``, in reading order.

        More than ``seq_length`` tokens are truncated by ``kept_lengths``, or with ``drops_turns`` by whole turns.  A
        cut inside an image or video is moved to before the token that starts it.  Raises UserError when the chat
        template does not render every answer, image and video, and TooLongError when no turn would remain.
        """
        turns, mask, masked = _masked(turns, self._control)
        text = self.render(turns)
        spans = self._answer_spans(text, turns)
        token_ids, offsets = self._tokens(text, mask, masked)
        places, repeats = self._repeats(token_ids, turns, grids)
        token_ids, ends = np.repeat(token_ids, repeats), np.cumsum(repeats)
        media = [range(end - size - 1, end + 1) for end, size in zip(ends[places], repeats[places], strict=True)]
        answers = [_covered(offsets, ends, span) for span in spans]

        if self.drops_turns:
            first = self._turn.match(text)
            stop = first.end() if first is not None and first[1] == "system" else 0
            num_system = int(np.searchsorted(offsets[:, 1], stop, side="right"))
            is_kept, num_dropped_turns = self._kept_turns(num_system, answers, len(token_ids))
        else:
            is_kept, num_dropped_turns = self._kept(answers, media, len(token_ids))
        is_target = np.full(len(token_ids), self.train_on_prompt)
        for answer in answers[-1:] if self.mask_history else answers:
            is_target[answer.start : answer.stop] = True
        token_ids, is_target = token_ids[is_kept], is_target[is_kept]
        labels = np.full(len(token_ids), IGNORE_INDEX, dtype=np.int64)
        labels[:-1] = np.where(is_target[1:], token_ids[1:], IGNORE_INDEX)
        kept_media = tuple(number for number, one in enumerate(media) if is_kept[one.start])
        return EncodedText(
            torch.from_numpy(token_ids), torch.from_numpy(labels), kept_media, len(is_kept) - len(token_ids),
            num_dropped_turns, len(masked) + _num_placeholders(turns))

    def encode_prompt(self, turns: Sequence[Turn], grids: Sequence[Grid]) -> EncodedText:
        """Encode a conversation that ends with a question, up to the beginning of the answer.  Nothing is truncated,
        and no token is a target.

        Raises UserError when the chat template does not render every image and video.
        """
        turns, mask, masked = _masked(turns, self._control)
        token_ids, _ = self._tokens(self.render(turns, for_generation=True), mask, masked)
        token_ids = torch.from_numpy(np.repeat(token_ids, self._repeats(token_ids, turns, grids)[1]))
        return EncodedText(token_ids, torch.full_like(token_ids, IGNORE_INDEX), tuple(range(len(grids))), 0, 0,
                           len(masked) + _num_placeholders(turns))

    def _repeats(
        self, token_ids: np.ndarray, turns: Sequence[Turn], grids: Sequence[Grid]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the image and video tokens, and how often to repeat each token, int64 [num_tokens].

        The template writes one token per image or video; the model reads one per merged patch.
        """
        expected = [self.image_token_id if isinstance(item, Image) else self.video_token_id
                    for turn in turns if turn.role == "user" for item in turn.media]
        places = np.flatnonzero(np.isin(token_ids, (self.image_token_id, self.video_token_id)))
        if token_ids[places].tolist() != expected or (token_ids[places - 1] != self.vision_start_token_id).any():
            raise UserError(
                f"the chat template renders {len(places)} of {len(expected)} images and videos, or not in order "
                f"after {self.family.tokens.vision_start}; use {self.family.title}'s template.")
        repeats = np.ones(len(token_ids), dtype=np.int64)
        repeats[places] = [t * h * w // self.spatial_merge_size**2 for t, h, w in grids]
        return places, repeats

    def _tokens(self, text: str, mask: str, masked: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int64 [num_tokens], and their spans in ``text``, int64 [num_tokens, 2].

        Each ``mask`` in the text is replaced by the next string of ``masked``, tokenized as plain text.
        """
        if half := HALF_CHARACTER.search(text):
            raise UserError(f"contains {half[0]!a} as the chat template renders it: half of a surrogate pair, which is "
                            f"not a character; repair the text, or use {self.family.title}'s template.")
        pieces = text.split(mask)
        if len(pieces) - 1 != len(masked):
            raise UserError(f"the chat template renders {len(pieces) - 1} of the {len(masked)} control tokens in the "
                            f"messages; use {self.family.title}'s template, which renders each message once.")
        ids, offsets, start = [], [], 0
        for number, piece in enumerate(pieces):
            if number:
                control = masked[number - 1]
                plain = self.tokenizer(control, add_special_tokens=False, split_special_tokens=True)["input_ids"]
                ids += plain
                offsets += [(start - 1, start)] * len(plain)
            encoding = self.tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids += encoding["input_ids"]
            offsets += [(start + first, start + last) for first, last in encoding["offset_mapping"]]
            start += len(piece) + 1
        return np.array(ids, dtype=np.int64), np.array(offsets, dtype=np.int64).reshape(-1, 2)

    def _kept_turns(self, num_system: int, answers: Sequence[range], num_tokens: int) -> tuple[np.ndarray, int]:
        """Which tokens are kept, bool [num_tokens], and the number of dropped turns: as many whole turns as fit, from
        the first one on, or with ``mask_history`` from the last one back."""
        starts = [num_system, *(answer.stop for answer in answers)]
        lengths = [answer.stop - start for start, answer in zip(starts, answers, strict=False)]
        direction = -1 if self.mask_history else 1
        totals = num_system + np.cumsum(lengths[::direction])
        num_kept = int(np.searchsorted(totals, self.seq_length, side="right"))
        if not num_kept:
            raise _too_long(int(totals[0]), self.seq_length)
        first = len(lengths) - num_kept if self.mask_history else 0
        is_kept = np.zeros(num_tokens, dtype=bool)
        is_kept[:num_system] = is_kept[starts[first] : starts[first + num_kept]] = True
        return is_kept, len(lengths) - num_kept

    def _kept(self, answers: Sequence[range], media: Sequence[range], num_tokens: int) -> tuple[np.ndarray, int]:
        """The same with LLaMA-Factory's rule."""
        starts = [0, *(answer.stop for answer in answers)]
        lengths = [(answer.start - start, len(answer)) for start, answer in zip(starts, answers, strict=False)]
        is_kept = np.zeros(num_tokens, dtype=bool)
        kept = kept_lengths(lengths, self.seq_length, self.mask_history)
        for start, answer, (num_question, num_answer) in zip(starts, answers, kept, strict=False):
            stop = start + num_question
            stop = next((one.start for one in media if one.start < stop < one.stop), stop)
            is_kept[start:stop] = is_kept[answer.start : answer.start + num_answer] = True
        return is_kept, kept.count((0, 0))

    def render(self, turns: Sequence[Turn], for_generation: bool = False) -> str:
        """The conversation rendered by the chat template, with one token per image and video.

        ``for_generation``: append the header of an answer.
        """
        messages: Any = [{"role": turn.role, "content": [
            {"type": "text", "text": item} if isinstance(item, str) else {"type": item.kind} for item in turn.content
        ] if turn.role == "user" else turn.text} for turn in turns]
        try:
            return cast(str, self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=for_generation))
        except TemplateError as error:
            raise UserError(
                f"the chat template cannot be used: {error}; use {self.family.title}'s template.") from error

    def _answer_spans(self, text: str, turns: Sequence[Turn]) -> list[tuple[int, int]]:
        """The spans of the answers in ``text``, each including the end of its turn."""
        tokens = self.family.tokens
        rendered = [match for match in self._turn.finditer(text) if match[1] == "assistant"]
        answers = [turn.text for turn in turns if turn.role == "assistant"]
        if [match[2] for match in rendered] != answers:
            raise UserError(
                f"the chat template does not render each answer unchanged between '{tokens.turn_start}assistant' and "
                f"'{tokens.turn_end}'; use {self.family.title}'s template.")
        return [(match.start(2), match.end()) for match in rendered]


def _too_long(num_tokens: int, seq_length: int) -> TooLongError:
    error = TooLongError(
        f"not even one question and answer fit in --seq-length {seq_length}: they take {num_tokens} tokens; raise "
        f"--seq-length, use fewer or smaller images and videos (image_max_pixels), or shorten the sample.")
    error.num_tokens = num_tokens
    return error


def _masked(turns: Sequence[Turn], control: re.Pattern[str]) -> tuple[list[Turn], str, list[str]]:
    """``turns`` with control tokens in messages replaced by a mask character, that mask, and the replaced tokens."""
    texts = [item for turn in turns for item in turn.content if isinstance(item, str)]
    whole = "".join(texts)
    mask = next(one for one in _MASKS if one not in whole)
    masked = [token for text in texts for token in control.findall(text)]  # a token never spans two texts
    return [Turn(turn.role, tuple(control.sub(mask, item) if isinstance(item, str) else item for item in turn.content))
            for turn in turns], mask, masked


def _num_placeholders(turns: Sequence[Turn]) -> int:
    """Media placeholders in message texts, which are plain text there."""
    texts = [item for turn in turns for item in turn.content if isinstance(item, str)]
    return sum(text.count(one.placeholder) for text in texts for one in KINDS.values())


def _covered(offsets: np.ndarray, ends: np.ndarray, span: tuple[int, int]) -> range:
    """The expanded tokens that overlap ``span``; ``ends`` has the end of each token of ``offsets`` after expansion.

    A token that starts before the span counts too: an answer's leading newline may share one with its header.
    """
    inside = np.flatnonzero((offsets[:, 1] > span[0]) & (offsets[:, 0] < span[1]))
    return range(int(ends[inside[0]]) - 1, int(ends[inside[-1]]))


def image_processor(data: DataConfig, rule: ResizeRule | None = None) -> ImageProcessor:
    """The image processor for ``data``, or with another ``rule``.  Raises UserError as ``from_directory`` does."""
    rule = rule or data.image_resize or "transformers"
    is_upright = rule == "transformers" if data.image_exif is None else data.image_exif
    return ImageProcessor.from_directory(
        data.model_name_or_path, data.image_min_pixels, data.image_max_pixels, rule, is_upright, data.image_backend)


@dataclass(frozen=True)
class SampleEncoder:
    """Everything that turns a ``Sample`` into tensors.  Pickles into data workers."""

    chat: ChatEncoder
    images: ImageProcessor
    videos: VideoProcessor
    tokens_per_second: int
    """Positions per second of video, from the model JSON."""
    arithmetic: Arithmetic
    """Computes the positions of tokens, as the model's family does."""

    @classmethod
    def from_config(cls, data: DataConfig, model: ModelConfig, seq_length: int) -> "SampleEncoder":
        """Read the tokenizer, the chat template and the image and video constants from ``data.model_name_or_path``.

        Raises UserError when they do not match the model JSON.
        """
        directory = data.model_name_or_path
        images = image_processor(data)
        videos = VideoProcessor.from_config(data, images)
        chat = ChatEncoder(
            load_tokenizer(directory, [model.family]),
            seq_length=seq_length,
            spatial_merge_size=model.vision.spatial_merge_size,
            family=model.family,
            train_on_prompt=data.train_on_prompt,
            mask_history=data.mask_history,
            drops_turns=data.drops_turns,
        )
        vision, tokens = model.vision, model.family.tokens
        pairs = [
            (f"the id of {tokens.image}", chat.image_token_id, "img_context_token_id", model.image_token_id),
            (f"the id of {tokens.video}", chat.video_token_id, "video_token_id", model.video_token_id),
            (f"the id of {tokens.vision_start}", chat.vision_start_token_id,
             "vision_start_token_id", model.vision_start_token_id),
        ]
        sizes = (("patch_size", "patch_size"), ("temporal_patch_size", "temporal_patch_size"),
                 ("merge_size", "spatial_merge_size"))
        for name, key in sizes:
            found, of_videos = getattr(images, name), getattr(videos.constants, name)
            pairs.append((name, found, key, getattr(vision, key)))
            if of_videos != found:
                pairs.append((f"{name} of videos", of_videos, key, getattr(vision, key)))
        refuse(
            f"{name} is {found} in {directory}, but {key} is {expected} in the model JSON; they must be equal."
            for name, found, key, expected in pairs if found != expected)
        largest = max(chat.tokenizer.get_vocab().values())
        if largest >= model.language.vocab_size:
            raise UserError(
                f"the tokenizer in {directory} has ids up to {largest}, but text_decoder.vocab_size is "
                f"{model.language.vocab_size}: some tokens would have no embedding; give the tokenizer of this model.")
        # Encoding a conversation with every kind of part detects another model's template early.
        conversation = [Turn("user", (Image(""), "question", Video(""))), Turn("assistant", ("answer",))]
        with naming(directory):
            chat.encode(conversation, [(1, chat.spatial_merge_size, chat.spatial_merge_size)] * 2)
        return cls(chat, images, videos, vision.tokens_per_second, arithmetic_of(model))

    def encode(self, sample: Sample) -> Microbatch:
        """One sample as a microbatch with one segment.  Raises UserError as ``outline`` and ``filled`` do."""
        return self.filled(self.outline(sample))

    def filled(self, outline: "Outline") -> Microbatch:
        """Add the pixels.  Raises UserError naming the sample and the image or video that cannot be decoded."""
        with naming(outline.where):
            pixels = [self._pixels(one) for one in outline.media]
        return replace(outline.microbatch, pixel_values=torch.cat(pixels) if pixels else None)

    def outline(self, sample: Sample) -> "Outline":
        """One sample without its pixels, from the headers of its media.

        Raises UserError naming the sample and, if an image or video causes it, that file; see ``ChatEncoder.encode``.
        """
        return self._outline(sample, self.chat.encode)

    def encode_prompt(self, prompt: Sample) -> Microbatch:
        """Like ``encode``, for a ``prompt``, whose last turn is a question.  It is not truncated and has no targets."""
        return self.filled(self._prompt(prompt))

    def prompt_length(self, prompt: Sample) -> int:
        """Number of tokens of a prompt.  Raises UserError also if no position remains for an answer."""
        return self._prompt(prompt).microbatch.num_tokens

    def _prompt(self, prompt: Sample) -> "Outline":
        outline, most = self._outline(prompt, self.chat.encode_prompt), self.chat.seq_length
        if (num_tokens := outline.microbatch.num_tokens) >= most:
            raise UserError(f"{prompt.where}: has {num_tokens} tokens, but the model has {most} positions, including "
                            f"the answer; shorten it, or lower image_max_pixels (mm.generate: --image-max-pixels)")
        return outline

    def _outline(self, sample: Sample, encode: Callable[[Sequence[Turn], Sequence[Grid]], EncodedText]) -> "Outline":
        with naming(sample.where):
            planned = [self.planned(one) for one in sample.media]
            text = encode(sample.turns, [one.grid for one in planned])
        kept = tuple(planned[number] for number in text.media)
        grids = tuple(one.grid for one in kept)
        seconds = tuple(one.seconds if isinstance(one, VideoPlan) else None for one in kept)
        positions = self.arithmetic.positions(
            text.token_ids, grids, self.chat.image_token_id, self.chat.vision_start_token_id, self.images.merge_size,
            VideoTimes(self.chat.video_token_id, self.tokens_per_second, seconds),
        )
        microbatch = Microbatch(
            token_ids=text.token_ids,
            labels=text.labels,
            positions=positions,
            segment_lengths=(text.token_ids.numel(),),
            image_grids=grids,
            pixel_values=None,
            num_omitted_images=len(planned) - len(kept),
            normalisations=tuple(self.videos.normalisation if isinstance(one, VideoPlan) else self.images.normalisation
                                 for one in kept),
        )
        return Outline(microbatch, kept, sample.where)

    def planned(self, media: Media) -> ImagePlan | VideoPlan:
        """How an image or video will be read, from its header.  Raises UserError naming its file."""
        if isinstance(media, Video):
            return self.videos.plan(media)
        return self.images.within(media).plan(media.path)

    def _pixels(self, planned: ImagePlan | VideoPlan) -> Tensor:
        if isinstance(planned, VideoPlan):
            return self.videos.patches(planned)
        return planned.processor.patches(planned)


@dataclass(frozen=True)
class Outline:
    """A sample without its pixels."""

    microbatch: Microbatch
    """With one segment."""
    media: tuple[ImagePlan | VideoPlan, ...]
    """One per grid.  Media cut off at ``seq_length`` are not included, and not decoded."""
    where: str
    """See ``Sample.where``."""
