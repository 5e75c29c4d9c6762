"""A model that is ready to answer prompts, on the ranks of its layout.

All ranks call the same methods together; only the data owner of each replica has the prompts.

What ``mm.generate`` and ``mm.evaluate`` open before they ask: weights -> device -> mesh -> stage.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mm.batch import Microbatch
from mm.config.data import DataConfig
from mm.config.generate import Asking, Decoding
from mm.config.model import LanguageConfig, ModelConfig
from mm.console import loading, ongoing
from mm.data.encode.encoder import SampleEncoder
from mm.device.device import Device
from mm.environment import software
from mm.errors import UserError, sorted_notes
from mm.generation.decode import Answer, Answerer, TokenListener
from mm.generation.prompts import Prompt, prompt_encoder
from mm.generation.source import ModelFiles, named_tokens
from mm.model import load
from mm.model.stage import Stage
from mm.parallel.agreement import on_first, together
from mm.parallel.mesh import Mesh
from mm.process import is_first_rank, print_notes
from mm.weights.trained import saved_among


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
    """The encoder of prompts, on ranks that own data; ``opened`` if this rank already has one.

    Raises UserError, the same on every rank.
    """
    return together(mesh, lambda: opened or prompt_encoder(media, model) if mesh.owns_data else None)


def with_stop_tokens(
    decoding: Decoding, words: Sequence[str], encoder: SampleEncoder | None, language: LanguageConfig, mesh: Mesh
) -> Decoding:
    """``decoding`` with the stop tokens ``words``, which are tokens or ids.

    Without ``words`` the result has the stop tokens of ``decoding``, or if it has none, the token that ends turns.
    Raises UserError, the same on every rank.
    """

    def find() -> tuple[int, ...]:
        assert encoder is not None, "rank 0 owns data"
        vocabulary = encoder.chat.tokenizer.get_vocab()
        named = named_tokens(words, vocabulary, language.vocab_size)
        return named or decoding.stop_token_ids or (vocabulary[encoder.chat.family.tokens.turn_end],)

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

    @classmethod
    def open(cls, asking: Asking, found: ModelFiles, device: Device, mesh: Mesh) -> "Session":
        """Build this rank's part and read its weights.  Raises UserError, the same on every rank."""
        args, model, media = asking.args, found.model, asking.media_config(found.directory)
        encoder = read_encoder(media, model, mesh)
        decoding = with_stop_tokens(found.decoding, args.stop_tokens, encoder, model.language, mesh)
        stage = Stage(model, mesh, args.precision, device)
        load.fill(stage, [one for one in stage.weights if not one.is_adapter], found.source, mesh)
        if found.adapters is not None:
            load.fill(stage, saved_among(stage.weights, model), found.adapters, mesh)
        return cls(stage, mesh, encoder, media, decoding, found.fingerprint, args.precision)

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
        """Answer ``prompts``, which the owner has, as one batch.

        Returns the answers, on the owner, shortest prompt first, and the problems of prompts without answer.
        """
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


if TYPE_CHECKING:
    from mm.generation.session import Session
    from mm.parallel.health.watchdog import Phase


@contextmanager
def opened(asking: Asking[Any], read: Callable[[], Sequence[str]] = tuple) -> Iterator[tuple["Session", "Phase"]]:
    """The model on this process's device, as one rank of the launcher's world, and the phases of its watchdog.

    ``read`` reads what is asked, on rank 0 before anything is loaded, and returns notes.  Raises UserError.
    """
    is_first = is_first_rank()
    with loading(is_first):
        from mm.generation.source import find
        from mm.parallel.health.rendezvous import Rendezvous
        from mm.parallel.health.watchdog import Watchdog

    args = asking.args
    with Watchdog(Rendezvous.of_launcher(args.distributed_timeout_minutes), None, facts=software()) as watchdog:
        with watchdog.phase("check"):
            notes = read() if is_first else ()
            found = find(asking) if is_first else None  # one rank reports what all of them would
        with ongoing("waiting for the other ranks", is_first):
            store = watchdog.meet()
        found = found or find(asking)
        if is_first:
            print_notes(sorted_notes((*asking.notes, *notes, *found.notes)), sys.stderr)
        with loading(is_first, "starting the device"):
            from mm.device.device import Device

            device = Device.pick(args.device)
            if is_first:
                print_notes(device.notes, sys.stderr)
            # megatron looks at the device while it is imported, so everything built on it comes after this
            from mm.generation.session import Session
            from mm.parallel import mesh as parallel

        with ongoing("connecting the ranks", is_first):
            mesh = parallel.start(
                device, found.model, args.tensor_model_parallel_size, args.distributed_timeout_minutes, store=store)
        watchdog.place(mesh)
        with watchdog.phase("load"):
            session = Session.open(asking, found, device, mesh)
        yield session, watchdog.phase
    parallel.stop()
