"""One question, or a conversation in the terminal; answers are shown while they are generated."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from transformers import TextStreamer

from mm.data.sample import Sample, Turn
from mm.errors import AgreedError, UserError
from mm.generation.decode import Answer
from mm.generation.prompts import Prompt, question
from mm.generation.session import Response, Session
from mm.parallel.agreement import on_first

HELP = "Ask anything; /image FILE and /video FILE add to the next question, /clear starts anew, and /exit ends.\n"


def ask_once(session: Session, make: Callable[[], Sample]) -> None:
    """Answer the prompt that ``make`` returns on rank 0, on its standard output; called on all ranks.

    Raises AgreedError if it cannot be asked.
    """
    prompt = Prompt(0, on_first(session.mesh, make))
    _, problems = _shown_answer(session, prompt)
    if problems:
        raise AgreedError(problems)


def _shown_answer(session: Session, prompt: Prompt) -> tuple[list[Response], tuple[str, ...]]:
    if session.mesh.rank != 0:
        return session.respond((prompt,))
    stream = TextStreamer(session.encoder.chat.tokenizer, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def listen(answer: Answer) -> None:
        stream.put(torch.tensor(answer.token_ids[-1:]))

    responses, problems = session.respond((prompt,), listen)
    if not problems:
        stream.end()
    return responses, problems


@dataclass
class Chat:
    """A conversation: its turns so far, and the media for the next question."""

    system: str | None
    images: list[str] = field(default_factory=list)
    videos: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    number: int = 0
    """Number of the next question; the random numbers depend on it."""

    def run(self, session: Session) -> None:
        """Ask and answer until the input of rank 0 ends; called on all ranks."""
        if session.mesh.rank == 0 and sys.stdin.isatty():
            sys.stdout.write(HELP)
        while True:
            outcome: list[Any] = [self._next() if session.mesh.rank == 0 else None]
            dist.broadcast_object_list(outcome, src=0, group=session.mesh.control_group)
            prompt = outcome[0]
            if prompt is None:
                return
            responses, problems = _shown_answer(session, prompt)
            if session.mesh.rank == 0:
                if not problems:
                    self.turns += [prompt.sample.turns[-1], Turn("assistant", (responses[0].text,))]
                self.images, self.videos = [], []
                _print_errors(problems)

    def _next(self) -> Prompt | None:
        """The next question; None at the end."""
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return None
            command, _, path = line.partition(" ")
            if command == "/exit":
                return None
            if command == "/clear":
                self.turns, self.images, self.videos = [], [], []
            elif command in ("/image", "/video"):
                (self.images if command == "/image" else self.videos).append(path.strip())
            elif line:
                try:
                    return self._prompt(line)
                except UserError as error:
                    self.images, self.videos = [], []
                    _print_errors(error.problems)

    def _prompt(self, text: str) -> Prompt:
        asked = question(text, self.images, self.videos)
        before = [] if self.system is None else [Turn("system", (self.system,))]
        self.number += 1
        return Prompt(self.number - 1, Sample((*before, *self.turns, asked), f"question {self.number}"))


def _print_errors(problems: Sequence[str]) -> None:
    sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    sys.stderr.flush()
