"""Answers a file of prompts, batch by batch over all replicas, into a file of answers; resumes after interruptions.

The batches depend on the prompts alone, so a run that was killed and started again answers each prompt in the same
batch as an uninterrupted run.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mm.errors import AgreedError, UserError, counted, printable
from mm.generation.answers import AnswerFile
from mm.generation.prompts import Prompt
from mm.generation.session import Response, Session
from mm.parallel.agreement import gather, on_first
from mm.parallel.watchdog import Phase
from mm.progress import Progress

ReadPrompts = Callable[[], tuple[list[Prompt], list[str]]]
"""Reads the valid prompts, and the problems of the others."""


@dataclass(frozen=True)
class PromptBatches:
    """The prompts to answer."""

    batches: tuple[tuple[Prompt, ...], ...]
    """Batches with unanswered prompts; the longest prompts first, so that a lack of memory shows at once."""
    problems: tuple[str, ...]
    """Problems of prompts that cannot be asked."""


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices of the prompts of each batch: prompts of similar ``lengths`` together, the longest first."""
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

    ``phase`` guards each.  All ranks call this function together.  Returns, on rank 0, the problems of prompts without
    an answer.
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


class FileOfPrompts:
    """Prompts from a file, and the file of their answers, which only rank 0 opens."""

    def __init__(self, session: Session, read: ReadPrompts, output: str, batch_size: int, phase: Phase) -> None:
        """``read`` is called on rank 0; ``phase`` guards each batch."""
        self._session, self._read, self._output, self._batch_size = session, read, output, batch_size
        self._phase = phase
        self._answers: AnswerFile | None = None
        self._progress: Progress | None = None

    def answer(self) -> None:
        """Answer all prompts; called on all ranks.

        Raises AgreedError at the end with the problems of prompts without an answer.
        """
        mesh = self._session.mesh
        plan = on_first(mesh, self._plan)
        problems = [*plan.problems, *answer_batches(self._session, plan.batches, self._write, self._phase)]
        found = on_first(mesh, lambda: self._close(problems))
        if found:
            raise AgreedError(found)

    def _plan(self) -> PromptBatches:
        prompts, problems = self._read()
        batches, more = in_batches(self._session, prompts, self._batch_size)
        self._answers = AnswerFile(self._output, {one.number: self._session.key(one) for one in prompts})
        done = self._answers.numbers
        self._progress = Progress("answering", len(prompts), "answers", len(done))
        left = [batch for batch in batches if any(prompt.number not in done for prompt in batch)]
        if done:
            _say(f"{self._output} already has {counted(len(done), 'answer')}")
        if problems or more:
            num_ready = sum(map(len, batches))
            _say(f"{counted(len(prompts) - num_ready, 'prompt')} cannot be asked; the reasons follow at the end of "
                 f"this run")
        return PromptBatches(tuple(left), (*problems, *more))

    def _write(self, responses: Sequence[Response]) -> None:
        assert self._answers is not None and self._progress is not None, "opened by rank 0"
        self._answers.add(self._record(one) for one in responses)
        self._progress.update(len(self._answers.numbers) - self._progress.done)

    def _record(self, response: Response) -> dict[str, Any]:
        prompt = response.prompt
        name = {} if prompt.name is None else {"id": prompt.name}
        return {"number": prompt.number, **name, "question": prompt.question, "answer": response.text,
                "ended": response.ended, "num_prompt_tokens": response.num_prompt_tokens,
                "num_answer_tokens": len(response.token_ids), "key": self._session.key(prompt)}

    def _close(self, problems: Sequence[str]) -> tuple[str, ...]:
        assert self._answers is not None and self._progress is not None, "opened by rank 0"
        self._progress.close()
        _say(f"{self._output} has {counted(len(self._answers.numbers), 'answer')}")
        self._answers.close()
        return tuple(dict.fromkeys(problems))


def _say(text: str) -> None:
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()
