"""One question, or a conversation in the terminal; answers are shown while they are generated."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch.distributed as dist

from mm.data.sample import Sample, Turn
from mm.errors import AgreedError, UserError, printable
from mm.generation.decode import Answer
from mm.generation.prompts import Prompt, question
from mm.generation.session import Response, Session
from mm.parallel.agreement import on_first

HELP = """\
Ask anything.  A line that starts with / is a command:
  /image FILE   add an image to the next question        /clear   start a new conversation
  /video FILE   add a video to the next question         /exit    end, like the end of the input
"""


class TextStream:
    """Writes an answer as it grows, without incomplete characters: some need several tokens."""

    def __init__(self, text_of: Callable[[Sequence[int]], str], stream: TextIO) -> None:
        self._text_of, self._stream, self._shown = text_of, stream, ""

    def listen(self, answer: Answer) -> None:
        """Print one answer as it grows; called with each of its tokens."""
        text = self._text_of(answer.token_ids)
        if text.endswith("\ufffd") and answer.ended is None:
            return
        new = text[len(self._shown) :]
        self._stream.write(printable(new) if self._stream.isatty() else new)
        self._stream.flush()
        self._shown = text


def ask_once(session: Session, make: Callable[[], Sample]) -> None:
    """Answer the prompt that ``make`` returns on rank 0, on its standard output; called on all ranks.

    Raises AgreedError if it cannot be asked.
    """
    prompt = Prompt(0, on_first(session.mesh, make))
    _, problems = _shown_answer(session, prompt)
    if problems:
        raise AgreedError(problems)


def _shown_answer(session: Session, prompt: Prompt) -> tuple[list[Response], tuple[str, ...]]:
    is_first = session.mesh.rank == 0
    stream = TextStream(session.text, sys.stdout) if is_first else None
    responses, problems = session.respond((prompt,), stream.listen if stream else None)
    if is_first and not problems:
        sys.stdout.write("\n")
        sys.stdout.flush()
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
            if session.mesh.rank != 0:
                continue
            if problems:
                self._complain(problems)
            else:
                self.turns += [prompt.sample.turns[-1], Turn("assistant", (responses[0].text,))]
                self.images, self.videos = [], []

    def _next(self) -> Prompt | None:
        """The next question; None at the end."""
        while True:
            if sys.stdin.isatty():
                sys.stdout.write("> ")
                sys.stdout.flush()
            line = sys.stdin.readline()
            if not line:
                return None
            command, _, rest = line.strip().partition(" ")
            match command:
                case "":
                    continue
                case "/exit":
                    return None
                case "/clear":
                    self.turns, self.images, self.videos = [], [], []
                case "/image" | "/video":
                    self._show(command.removeprefix("/"), rest.strip())
                case _ if command.startswith("/"):
                    sys.stdout.write(HELP)
                case _:
                    try:
                        return self._prompt(line.strip())
                    except UserError as error:
                        self._complain(error.problems)

    def _prompt(self, text: str) -> Prompt:
        asked = question(text, self.images, self.videos)
        before = [] if self.system is None else [Turn("system", (self.system,))]
        self.number += 1
        sample = Sample((*before, *self.turns, asked), f"question {self.number}")
        return Prompt(self.number - 1, sample)

    def _show(self, kind: str, path: str) -> None:
        """Keep a file for the next question, if it exists."""
        try:
            question("", [path] if kind == "image" else [], [path] if kind == "video" else [])
        except UserError as error:
            _print_errors(error.problems)
            return
        (self.images if kind == "image" else self.videos).append(path)

    def _complain(self, problems: Sequence[str]) -> None:
        """Report problems; the conversation continues without the question and its media."""
        self.images, self.videos = [], []
        _print_errors(problems)


def _print_errors(problems: Sequence[str]) -> None:
    sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    sys.stderr.flush()
