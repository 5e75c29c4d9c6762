"""A model that is ready to answer prompts, on the ranks of its layout.

All ranks call the same methods together; only the data owner of each replica has the prompts.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mm.batch import Microbatch
from mm.config.data import DataConfig
from mm.config.generate import Decoding
from mm.config.model import LanguageConfig, ModelConfig
from mm.console import whole_number
from mm.data.encode import SampleEncoder
from mm.errors import UserError, nearest, refuse
from mm.generation.decode import Answer, Answerer, TokenListener
from mm.generation.prompts import Prompt
from mm.model.stage import Stage
from mm.parallel.agreement import on_first, together
from mm.parallel.mesh import Mesh


@dataclass(frozen=True)
class Response:
    """An answer as text."""

    prompt: Prompt
    text: str
    ended: str
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    """Includes the token that ended it."""


def read_encoder(
    media: DataConfig, model: ModelConfig, mesh: Mesh, opened: SampleEncoder | None = None
) -> SampleEncoder | None:
    """The encoder of prompts, on ranks that own data; ``opened`` if this rank already has one."""
    return together(mesh, lambda: opened or SampleEncoder.from_config(
        media, model, model.language.max_position_embeddings) if mesh.owns_data else None)


def with_stop_tokens(
    decoding: Decoding, words: Sequence[str], encoder: SampleEncoder | None, language: LanguageConfig, mesh: Mesh
) -> Decoding:
    """``decoding`` with the stop tokens ``words``, which are tokens or ids; without, its own or the end of turns."""

    def find() -> tuple[int, ...]:
        assert encoder is not None, "rank 0 owns data"
        vocabulary = encoder.chat.tokenizer.get_vocab()
        named = [(word, vocabulary.get(word, whole_number(word))) for word in words]
        refuse(f"--stop-tokens has {word!r}{nearest(word, vocabulary)}; expected tokens of the tokenizer, or ids below "
               f"{language.vocab_size}" for word, one in named if one is None or one >= language.vocab_size)
        stated = tuple(one for _, one in named if one is not None)
        return stated or decoding.stop_token_ids or (vocabulary[encoder.chat.family.tokens.turn_end],)

    return replace(decoding, stop_token_ids=on_first(mesh, find))


class Session:
    """The model, its tokenizer, and the rules that choose tokens."""

    def __init__(
        self, stage: Stage, mesh: Mesh, encoder: SampleEncoder | None, media: DataConfig, decoding: Decoding,
        weights: str = "", precision: str = "",
    ) -> None:
        """``stage`` has its weights; ``encoder`` comes from ``read_encoder``, ``decoding`` from ``with_stop_tokens``.

        ``weights``, a fingerprint of the weights, and ``precision`` are for ``key``.
        """
        self.stage, self.mesh, self._encoder = stage, mesh, encoder
        self.media, self.decoding, self.weights, self._precision = media, decoding, weights, precision
        self._answerer = Answerer(stage, mesh, decoding)

    @property
    def encoder(self) -> SampleEncoder:
        """The encoder, on the owner of a replica."""
        assert self._encoder is not None, "only the owner of a replica reads prompts"
        return self._encoder

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, without control tokens."""
        decode: Callable[..., Any] = self.encoder.chat.tokenizer.decode
        return decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def length(self, prompt: Prompt) -> int:
        """Number of tokens of a prompt, on the owner.  Raises UserError for a prompt that cannot be asked."""
        return self.encoder.prompt_length(prompt.sample)

    def key(self, prompt: Prompt) -> str:
        """A key that changes with the prompt, the weights and the settings."""
        facts = [prompt.digest, self.weights, asdict(self.decoding), asdict(self.media), self._precision]
        return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]

    def respond(
        self, prompts: Sequence[Prompt], listen: TokenListener | None = None
    ) -> tuple[list[Response], tuple[str, ...]]:
        """Answer ``prompts`` as one batch: on the owner, the answers, shortest prompt first; and problems of others."""
        batch, numbers, problems = self._shared(prompts)
        if batch is None:
            return [], problems
        answers = self._answerer.answer(batch, numbers, listen)
        if not self.mesh.owns_data:
            return [], problems
        by_number = {prompt.number: prompt for prompt in prompts}
        return [self._response(by_number[answer.prompt], answer, length)
                for answer, length in zip(answers, batch.segment_lengths, strict=True)], problems

    def _response(self, prompt: Prompt, answer: Answer, length: int) -> Response:
        assert answer.ended is not None, "every answer is complete"
        return Response(prompt, self.text(answer.token_ids), answer.ended, length, tuple(answer.token_ids))

    def _shared(self, prompts: Sequence[Prompt]) -> tuple[Microbatch | None, list[int], tuple[str, ...]]:
        """Share the prompts as one microbatch with every rank of the replica, with pixels where they are needed.

        Returns it (None without valid prompts), its prompts' numbers in order, and the problems of the other prompts.
        """
        mesh, whole, pixels = self.mesh, None, None
        numbers: list[int] = []
        problems: list[str] = []
        if mesh.owns_data:
            whole, numbers, problems = self._encoded(prompts)
            pixels = None if whole is None else whole.pixel_values
        outcome: list[Any] = [None if whole is None else replace(whole, pixel_values=None), numbers, tuple(problems)]
        if mesh.replica_group.size() > 1:
            dist.broadcast_object_list(outcome, src=mesh.replica_owner, group=mesh.replica_group)
        light, numbers, found = outcome
        if light is None or not light.image_grids:
            return light, numbers, found
        (group,) = mesh.pixel_groups
        if group is not None:
            if pixels is None:
                shape = (light.num_patches, self.stage.model.vision.patch_elements)
                pixels = torch.empty(shape, dtype=torch.uint8)
            dist.broadcast(pixels, src=mesh.replica_owner, group=group)
        return replace(light, pixel_values=pixels if self.stage.has_patch_embedding else None), numbers, found

    def _encoded(self, prompts: Sequence[Prompt]) -> tuple[Microbatch | None, list[int], list[str]]:
        ready: list[tuple[int, Microbatch]] = []
        problems: list[str] = []
        for prompt in prompts:
            try:
                ready.append((prompt.number, self.encoder.encode_prompt(prompt.sample)))
            except UserError as error:
                problems += error.problems
        ready.sort(key=lambda one: one[1].num_tokens)  # as Microbatch.join does
        whole = Microbatch.join(one for _, one in ready) if ready else None
        return whole, [number for number, _ in ready], problems
