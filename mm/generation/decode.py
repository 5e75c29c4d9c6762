"""Answers token by token: the trainer's forward pass over the stages of a replica, with a cache of keys and values.

All ranks of a replica call ``Answerer.answer`` together with the same prompts.  The stage with the output layer chooses
each token by transformers' rules, in their order (repetition penalty, temperature, top-k, top-p), and broadcasts it.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mm.batch import IGNORE_INDEX, Microbatch
from mm.config.generate import Decoding
from mm.model.layers.attention import KeyValueCache, Places
from mm.model.stage import Stage
from mm.parallel.mesh import Mesh
from mm.parallel.pipeline.p2p import message_shape
from mm.placement import StageSpec


def drawn_number(seed: int, prompt: int, position: int) -> float:
    """The random number in [0, 1) for a token of an answer; it depends on neither the layout nor the other prompts."""
    digest = hashlib.blake2b(f"{seed} {prompt} {position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32


def penalized(logits: Tensor, was_there: Tensor, penalty: float) -> Tensor:
    """Make earlier tokens, ``was_there`` bool [rows, vocabulary], less likely (Keskar et al., arXiv:1909.05858)."""
    return torch.where(was_there, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def probabilities(logits: Tensor, decoding: Decoding) -> Tensor:
    """Probability of each token, float32 [rows, vocabulary]; 0 for tokens that are never drawn."""
    warpers = [TemperatureLogitsWarper(float(decoding.temperature)),
               *([TopKLogitsWarper(decoding.top_k)] if decoding.top_k else ()),
               *([TopPLogitsWarper(decoding.top_p)] if decoding.top_p < 1 else ())]
    ids = torch.empty(0, dtype=torch.int64)  # they ask for earlier tokens, and do not look at them
    for warper in warpers:
        logits = warper(ids, logits)
    return logits.softmax(dim=1)


def next_tokens(logits: Tensor, decoding: Decoding, prompts: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Token ids, int64 [rows], on the device of ``logits``, float32 [rows, vocabulary], which may be penalized.

    Row i is token ``positions[i]`` of the answer to prompt ``prompts[i]``.  A random number picks the first token at
    which the cumulative sum of probabilities exceeds it, summed in float64 on the host, because some devices have none.
    """
    if decoding.temperature == 0.0:
        return logits.argmax(dim=1)
    sums = probabilities(logits, decoding).cpu().double().cumsum(dim=1)
    numbers = [drawn_number(decoding.seed, prompt, position)
               for prompt, position in zip(prompts, positions, strict=True)]
    falls_at = torch.tensor(numbers, dtype=torch.float64)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, falls_at, right=True).squeeze(1).to(logits.device)


@dataclass
class Answer:
    """The answer to one prompt so far."""

    prompt: int
    """The prompt's number; the random numbers depend on it."""
    num_tokens: int
    """Tokens of prompt and answer."""
    next_position: int
    """Position of the next token, the same on all three axes."""
    token_ids: list[int] = field(default_factory=list)
    """Includes the token that ended it."""
    ended: str | None = None
    """"stop": a stop token ended it; "length": it reached the maximum length; None: it is not complete."""


TokenListener = Callable[[Answer], None]
"""Called after each token, on every rank, with each answer of the batch."""


class Answerer:
    """One rank's part of the model, which answers batches of prompts together with the other ranks of its replica."""

    def __init__(self, stage: Stage, mesh: Mesh, decoding: Decoding) -> None:
        self._stage, self._mesh, self._decoding = stage, mesh, decoding
        self._placement = stage.model.placement()
        self._context = replace(mesh.context, is_alone=True)  # all ranks of the context axis compute the same
        self._device = stage.device.torch_device
        self._like = torch.empty(0, dtype=stage.config.params_dtype, device=self._device)
        self._stages = dist.get_process_group_ranks(mesh.groups.pp)
        self._caches: dict[int, KeyValueCache] = {}
        """Caches by chunk, for the chunks with LLM layers."""
        self._was_there: Tensor | None = None
        """Earlier tokens, bool [sequences, vocabulary], on the choosing stage; None without a repetition penalty."""

    @torch.no_grad()
    def answer(self, prompts: Microbatch, numbers: Sequence[int], listen: TokenListener | None = None) -> list[Answer]:
        """Answer prompts, one per segment, with these ``numbers``; returns the answers in the same order."""
        answers = going_on = _begun(prompts, numbers)
        language = self._stage.model.language
        groups, width = language.num_query_groups // self._mesh.tp_size, language.head_dim
        self._caches = {number: KeyValueCache(map(str, chunk.spec.language_layers), groups, self._like.new_empty(width))
                        for number, chunk in enumerate(self._stage.chunks) if chunk.spec.language_layers}
        logits = self._forward(prompts, Places.of_sequences(prompts.segment_lengths, self._device))
        self._remember(prompts, logits)
        while True:
            self._take(going_on, self._chosen(logits, going_on))
            if listen is not None:
                for answer in going_on:
                    listen(answer)
            unended = [index for index, answer in enumerate(going_on) if answer.ended is None]
            if not unended:
                self._caches, self._was_there = {}, None
                return answers
            if 2 * len(unended) <= len(going_on):  # ended sequences cost as much as the others
                going_on = [going_on[index] for index in unended]
                self._keep(unended)
            lengths = [answer.num_tokens for answer in going_on]
            logits = self._forward(_new_tokens(going_on), Places.of_new_tokens(lengths, self._device))

    def _forward(self, microbatch: Microbatch, places: Places) -> Tensor | None:
        """One pass through all slots: logits of the last row of each segment where the output layer is, else None."""
        logits = None
        for spec in self._placement.slots:
            if spec.stage != self._mesh.pp_rank:
                continue
            chunk = self._stage.chunks[spec.chunk]
            inputs = chunk.prepare(microbatch, None, is_whole=True)
            if inputs.language is not None:
                caches = self._caches[spec.chunk].during(places)
                inputs = replace(inputs, language=replace(inputs.language, caches=caches))
            x = chunk.hidden_states(inputs, self._receive(spec, microbatch))
            if spec.has_head:
                assert x is not None, "every microbatch has tokens"
                last = torch.tensor(microbatch.segment_lengths).cumsum(0) - 1
                logits = self._whole(chunk.text_decoder.logits(x[last.to(self._device)])).float()
            else:
                self._send(spec, microbatch, x)
        return logits

    def _whole(self, columns: Tensor) -> Tensor:
        """Logits of the whole vocabulary, gathered from the columns of each tensor-parallel rank."""
        group = self._mesh.groups.tp
        if group.size() == 1:
            return columns
        of_ranks = [torch.empty_like(columns) for _ in range(group.size())]
        dist.all_gather(of_ranks, columns.contiguous(), group=group)
        return torch.cat(of_ranks, dim=1)

    def _receive(self, spec: StageSpec, microbatch: Microbatch) -> Tensor | None:
        shape = message_shape(spec.receives, microbatch, self._stage.model, self._context)
        if shape is None:
            return None
        received = self._like.new_empty(shape)
        dist.recv(received, src=self._stages[spec.stage - 1], group=self._mesh.groups.pp)
        return received

    def _send(self, spec: StageSpec, microbatch: Microbatch, x: Tensor | None) -> None:
        if message_shape(spec.sends, microbatch, self._stage.model, self._context) is not None:
            assert x is not None, f"slot of stage {spec.stage} has nothing to pass on"
            following = self._stages[(spec.stage + 1) % len(self._stages)]
            dist.send(x.contiguous(), dst=following, group=self._mesh.groups.pp)

    def _chosen(self, logits: Tensor | None, answers: Sequence[Answer]) -> list[int]:
        """The next token of each sequence, on every rank."""
        chosen = torch.empty(len(answers), dtype=torch.int64, device=self._device)
        if logits is not None:
            if self._was_there is not None:
                logits = penalized(logits, self._was_there, self._decoding.repetition_penalty)
            chosen = next_tokens(logits, self._decoding, [one.prompt for one in answers],
                                 [len(one.token_ids) for one in answers])
            if self._was_there is not None:
                self._was_there.scatter_(1, chosen[:, None], True)
        if len(self._stages) > 1:
            dist.broadcast(chosen, src=self._stages[self._placement.head_slot.stage], group=self._mesh.groups.pp)
        return chosen.tolist()

    def _take(self, answers: Sequence[Answer], token_ids: Sequence[int]) -> None:
        """Add a token to each unfinished answer, and end those that are complete."""
        decoding, most = self._decoding, self._stage.model.language.max_position_embeddings
        for answer, token_id in zip(answers, token_ids, strict=True):
            answer.num_tokens += 1
            if answer.ended is None:
                answer.token_ids.append(token_id)
                if token_id in decoding.stop_token_ids:
                    answer.ended = "stop"
                elif len(answer.token_ids) == decoding.max_new_tokens or answer.num_tokens >= most:
                    answer.ended = "length"

    def _remember(self, prompts: Microbatch, logits: Tensor | None) -> None:
        """Record the tokens of the prompts for the repetition penalty, as transformers does."""
        self._was_there = None
        if logits is not None and self._decoding.repetition_penalty != 1.0:
            self._was_there = torch.zeros_like(logits, dtype=torch.bool)
            for row, token_ids in zip(self._was_there, prompts.token_ids.split(prompts.segment_lengths), strict=True):
                row[token_ids.to(self._device)] = True

    def _keep(self, sequences: list[int]) -> None:
        for cache in self._caches.values():
            cache.keep(sequences)
        if self._was_there is not None:
            self._was_there = self._was_there[torch.tensor(sequences, device=self._device)]


def _begun(prompts: Microbatch, numbers: Sequence[int]) -> list[Answer]:
    """Empty answers; positions continue after a prompt's largest one (transformers' ``rope_deltas``)."""
    positions = prompts.positions.split(prompts.segment_lengths, dim=1)
    return [Answer(number, length, int(one.max()) + 1) for number, length, one in
            zip(numbers, prompts.segment_lengths, positions, strict=True)]


def _new_tokens(answers: Sequence[Answer]) -> Microbatch:
    """The newest token of each sequence as its own segment (an ended one's is ignored); advances the positions."""
    positions = torch.tensor([answer.next_position for answer in answers])
    for answer in answers:
        answer.next_position += 1
    return Microbatch(
        torch.tensor([answer.token_ids[-1] for answer in answers]), torch.full((len(answers),), IGNORE_INDEX),
        positions.repeat(3, 1), (1,) * len(answers), image_grids=(), pixel_values=None)
