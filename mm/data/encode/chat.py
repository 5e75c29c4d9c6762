"""Conversations as token ids and labels.

The checkpoint's own chat template renders the text, which is tokenized once as a whole, so token ids equal those of
transformers.  Targets are those of LLaMA-Factory and MindSpeed-MM: each answer, the token after it that ends the turn,
and the newline after that.

How much of each turn of a conversation remains when it has too many tokens.  Pure functions of numbers of tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mm.batch import IGNORE_INDEX, Grid
from mm.config.schema import read_json
from mm.data.records.formats import HALF_CHARACTER
from mm.data.sample import KINDS, Image, Turn
from mm.errors import UserError, refuse
from mm.families import FAMILIES
from mm.families.family import Family


def kept_lengths(
    lengths: Sequence[tuple[int, int]], limit: int, last_first: bool = False
) -> list[tuple[int, int]]:
    """How many tokens of the question and answer of each turn to keep, given their ``lengths``; at most ``limit`` in
    total.

    LLaMA-Factory's rule (``infer_seqlen`` in its data/processor): turns take what they need, from the first one on or
    from the last one back.  In the turn that does not fit, the longer part is cut; both are cut in proportion if each
    takes more than half.
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


def kept_turns(lengths: Sequence[int], limit: int, last_first: bool = False) -> range:
    """Which turns, given their ``lengths`` in tokens, are kept whole so that they fit in ``limit`` tokens.

    As many as fit from the first one on, or with ``last_first`` from the last one back; none if that one alone is too
    long.
    """
    num_kept = int(np.searchsorted(np.cumsum(lengths[::-1] if last_first else lengths), limit, side="right"))
    return range(len(lengths) - num_kept, len(lengths)) if last_first else range(num_kept)


_MASKS = [chr(code) for code in range(0xE000, 0xF8FF)]
"""Private-use characters.  One that no message contains replaces control tokens while the template is rendered."""


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
    """Renders, tokenizes, labels and truncates conversations.

    A sample without a system message gets the template's default, such as a default system prompt.
    """

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

    @property
    def media_token_ids(self) -> frozenset[int]:
        """Token ids of the placeholders for visual tokens."""
        return frozenset({self.image_token_id, self.video_token_id})

    @cached_property
    def video_token_id(self) -> int:
        return self.tokenizer.get_vocab()[self.family.tokens.video]

    @cached_property
    def vision_start_token_id(self) -> int:
        return self.tokenizer.get_vocab()[self.family.tokens.vision_start]

    def encode(self, turns: Sequence[Turn], grids: Sequence[Grid]) -> EncodedText:
        """Encode a conversation whose images and videos have ``grids``, in reading order.

        More than ``seq_length`` tokens are truncated by ``kept_lengths``, or with ``drops_turns`` by ``kept_turns``.  A
        cut never falls inside an image or video: it is moved to before the token that starts it, and that image and all
        later ones of the question are dropped.  Raises UserError when the chat template does not render every answer,
        image and video, and TooLongError when no turn would remain.
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
            num_system = _num_system_tokens(self._turn.match(text), offsets)
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
        places, repeats = self._media_places(token_ids, turns), np.ones(len(token_ids), dtype=np.int64)
        repeats[places] = [t * h * w // self.spatial_merge_size**2 for t, h, w in grids]
        return places, repeats

    def _media_places(self, token_ids: np.ndarray, turns: Sequence[Turn]) -> np.ndarray:
        """Positions of the single tokens that stand for the images and videos of ``turns``."""
        expected = [self.image_token_id if isinstance(item, Image) else self.video_token_id
                    for turn in turns if turn.role == "user" for item in turn.media]
        places = np.flatnonzero(np.isin(token_ids, (self.image_token_id, self.video_token_id)))
        if token_ids[places].tolist() != expected or (token_ids[places - 1] != self.vision_start_token_id).any():
            raise UserError(
                f"the chat template renders {len(places)} of {len(expected)} images and videos, or not in order "
                f"after {self.family.tokens.vision_start}; use {self.family.title}'s template."
            )
        return places

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
        """Which tokens are kept, bool [num_tokens], and the number of dropped turns."""
        starts = [num_system, *(answer.stop for answer in answers)]
        lengths = [answer.stop - start for start, answer in zip(starts, answers, strict=False)]
        turns = kept_turns(lengths, self.seq_length - num_system, self.mask_history)
        if not turns:
            raise _too_long(num_system + lengths[-1 if self.mask_history else 0], self.seq_length)
        is_kept = np.zeros(num_tokens, dtype=bool)
        is_kept[:num_system] = is_kept[starts[turns.start] : starts[turns.stop]] = True
        return is_kept, len(lengths) - len(turns)

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
        messages: Any = [
            {"role": turn.role, "content": _contents(turn) if turn.role == "user" else turn.text} for turn in turns
        ]
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
                f"'{tokens.turn_end}'; use {self.family.title}'s template."
            )
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


def _contents(turn: Turn) -> list[dict[str, str]]:
    """A user turn in the form that transformers' chat templates take."""
    return [{"type": "text", "text": item} if isinstance(item, str) else {"type": item.kind} for item in turn.content]


def _num_placeholders(turns: Sequence[Turn]) -> int:
    """Media placeholders in message texts, which are plain text there."""
    texts = [item for turn in turns for item in turn.content if isinstance(item, str)]
    return sum(text.count(one.placeholder) for text in texts for one in KINDS.values())


def _num_system_tokens(first: re.Match[str] | None, offsets: np.ndarray) -> int:
    """Number of tokens of a rendered conversation's ``first`` turn if it is a system turn; else 0."""
    stop = first.end() if first is not None and first[1] == "system" else 0
    return int(np.searchsorted(offsets[:, 1], stop, side="right"))


def _covered(offsets: np.ndarray, ends: np.ndarray, span: tuple[int, int]) -> range:
    """The expanded tokens that overlap ``span``; ``ends`` has the end of each token of ``offsets`` after expansion.

    A token that starts before the span counts too: an answer's leading newline may share a token with the newline of
    its header.
    """
    inside = np.flatnonzero((offsets[:, 1] > span[0]) & (offsets[:, 0] < span[1]))
    return range(int(ends[inside[0]]) - 1, int(ends[inside[-1]]))
