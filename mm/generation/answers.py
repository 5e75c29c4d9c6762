"""Answers to a file of prompts, batch by batch over all replicas; or to one question or a chat, shown token by token.

The file of answers has one JSON object per line, appended whole, kept across interruptions, and sorted at the end.  The
batches depend on the prompts alone, so a run that was killed and started again answers each prompt in the same batch as
an uninterrupted run.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TextStreamer

from mm.console import Progress
from mm.data.sample import Sample, Turn
from mm.errors import AgreedError, UserError, counted, writing
from mm.files import json_object, whole_lines, write_whole
from mm.generation.prompts import Prompt, question
from mm.generation.session import Response, Session
from mm.parallel.agreement import gather, on_first
from mm.parallel.health.watchdog import Phase


class AnswerFile:
    """The answers in one file; every line has the prompt's ``number`` and its ``Session.key``."""

    def __init__(self, path: str | Path, keys: Mapping[int, str]) -> None:
        """Open or create the file without a partial last line.  ``keys``: of every prompt, by number.

        Raises UserError if the file cannot be written, or has anything other than answers to these prompts.
        """
        self.path = Path(path)
        self._lines: dict[int, bytes] = {}
        for place, line in enumerate(whole_lines(self.path.read_bytes()) if self.path.exists() else (), start=1):
            try:
                answer = json_object(line)
                number, is_ours = answer["number"], keys.get(answer["number"]) == answer["key"]
            except (ValueError, KeyError, TypeError):
                number, is_ours = 0, False
            if not is_ours:
                raise UserError(f"{path}:{place}: is no answer to one of these prompts, or was made with other weights "
                                f"or settings; give another --output, or remove the file to ask everything again.")
            self._lines[number] = line
        with writing(self.path, "--output"):
            write_whole(self.path, b"".join(self._lines.values()))
            self._stream = self.path.open("ab")

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of the answered prompts."""
        return frozenset(self._lines)

    def add(self, answers: Iterable[Mapping[str, Any]]) -> None:
        """Add the answers that are not in the file yet, and sync it to disk."""
        # half of a surrogate pair, which UTF-8 does not have, becomes JSON's escape of it
        new = {int(one["number"]): json.dumps(one, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
               for one in answers if one["number"] not in self._lines}
        with writing(self.path, "--output"):
            self._stream.write(b"".join(new.values()))
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self._lines |= new

    def close(self) -> None:
        """Sort the lines by prompt, atomically, and close the file."""
        self._stream.close()
        with writing(self.path, "--output"):
            write_whole(self.path, b"".join(self._lines[number] for number in sorted(self._lines)), syncs=True)


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices of the prompts of each batch, of similar ``lengths``; the longest first, to run out of memory at once."""
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def in_batches(
    session: Session, prompts: Sequence[Prompt], batch_size: int
) -> tuple[list[tuple[Prompt, ...]], list[str]]:
    """Batches of the prompts that can be asked, and the problems of the others; called on rank 0."""
    lengths: list[int] = []
    ready: list[Prompt] = []
    problems: list[str] = []
    for prompt in Progress("measuring prompts", len(prompts), "prompts").each(prompts):
        try:
            lengths.append(session.length(prompt))
            ready.append(prompt)
        except UserError as error:
            problems += error.problems
    return [tuple(ready[number] for number in batch) for batch in by_length(lengths, batch_size)], problems


def answer_batches(
    session: Session, batches: Sequence[Sequence[Prompt]], keep: Callable[[Sequence[Response]], None], phase: Phase
) -> list[str]:
    """Distribute ``batches`` over the replicas, one to each at a time, and pass the answers to ``keep`` on rank 0.

    All ranks call it.  ``phase`` guards each batch.  Returns, on rank 0, the problems of prompts without an answer.
    """
    mesh = session.mesh
    problems: list[str] = []
    for first in range(0, len(batches), mesh.dp_size):
        number = first + mesh.dp_rank
        with phase("answers"):
            responses, refused = session.respond(batches[number] if number < len(batches) else ())
            gathered = gather(mesh, (responses, refused if mesh.owns_data else ()))
            on_first(mesh, lambda gathered=gathered: keep([one for responses, _ in gathered for one in responses]))
        problems += [problem for _, refused in gathered for problem in refused]
    return problems


def answer_file(
    session: Session, read: Callable[[], tuple[list[Prompt], list[str]]], output: str, batch_size: int, phase: Phase
) -> None:
    """Answer all prompts that ``read`` returns on rank 0, with the problems of others, into the file ``output``.

    All ranks call it.  Raises AgreedError at the end with the problems of prompts without an answer.
    """
    mesh = session.mesh

    opened: list[tuple[AnswerFile, Progress]] = []  # on rank 0

    def prepare() -> tuple[list[tuple[Prompt, ...]], list[str]]:
        prompts, problems = read()
        batches, more = in_batches(session, prompts, batch_size)
        answers = AnswerFile(output, {one.number: session.key(one) for one in prompts})
        if answers.numbers:
            sys.stderr.write(f"{output} already has {counted(len(answers.numbers), 'answer')}\n")
        opened.append((answers, Progress("answering", len(prompts), "answers", len(answers.numbers))))
        left = [batch for batch in batches if any(prompt.number not in answers.numbers for prompt in batch)]
        return left, [*problems, *more]

    def keep(responses: Sequence[Response]) -> None:
        ((answers, progress),) = opened
        answers.add(_record(session, one) for one in responses)
        progress.update(len(answers.numbers) - progress.done)

    def close() -> tuple[str, ...]:
        ((answers, progress),) = opened
        progress.close()
        sys.stderr.write(f"{output} has {counted(len(answers.numbers), 'answer')}\n")
        answers.close()
        return tuple(dict.fromkeys(problems))

    batches, problems = on_first(mesh, prepare)
    problems = [*problems, *answer_batches(session, batches, keep, phase)]
    if found := on_first(mesh, close):
        raise AgreedError(found)


def _record(session: Session, response: Response) -> dict[str, Any]:
    prompt = response.prompt
    name = {} if prompt.name is None else {"id": prompt.name}
    return {"number": prompt.number, **name, "question": prompt.question, "answer": response.text,
            "ended": response.ended, "num_prompt_tokens": response.num_prompt_tokens,
            "num_answer_tokens": len(response.token_ids), "key": session.key(prompt)}


HELP = "Ask anything; /image FILE and /video FILE add to the next question, /clear starts anew, and /exit ends.\n"


def ask_once(session: Session, make: Callable[[], Sample]) -> None:
    """Answer the prompt that ``make`` returns on rank 0, on its standard output; called on all ranks."""
    _, problems = _shown_answer(session, Prompt(0, on_first(session.mesh, make)))
    if problems:
        raise AgreedError(problems)


def _shown_answer(session: Session, prompt: Prompt) -> tuple[list[Response], tuple[str, ...]]:
    if session.mesh.rank != 0:
        return session.respond((prompt,))
    stream = TextStreamer(session.encoder.chat.tokenizer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    responses, problems = session.respond((prompt,), lambda one: stream.put(torch.tensor(one.token_ids[-1:])))
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
