"""Answers a file of prompts, batch by batch over all replicas, into a file of answers; resumes after interruptions.

The batches depend on the prompts alone, so a run that was killed and started again answers each prompt in the same
batch as an uninterrupted run.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from mm.errors import AgreedError, UserError, counted
from mm.generation.answers import AnswerFile
from mm.generation.prompts import Prompt
from mm.generation.session import Response, Session
from mm.parallel.agreement import gather, on_first, together
from mm.parallel.health.watchdog import Phase
from mm.progress import Progress

ReadPrompts = Callable[[], tuple[list[Prompt], list[str]]]
"""Reads the valid prompts, and the problems of the others."""
Batches = list[tuple[Prompt, ...]]
"""The longest prompts first, so that a lack of memory shows at once."""


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices of the prompts of each batch: prompts of similar ``lengths`` together, the longest first."""
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def in_batches(session: Session, prompts: Sequence[Prompt], batch_size: int) -> tuple[Batches, list[str]]:
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


def answer_file(session: Session, read: ReadPrompts, output: str, batch_size: int, phase: Phase) -> None:
    """Answer all prompts that ``read`` returns on rank 0 into the file ``output``; called on all ranks.

    ``phase`` guards each batch.  Raises AgreedError at the end with the problems of prompts without an answer.
    """
    mesh = session.mesh

    def prepare() -> tuple[AnswerFile, Progress, Batches, list[str]]:
        prompts, problems = read()
        batches, more = in_batches(session, prompts, batch_size)
        answers = AnswerFile(output, {one.number: session.key(one) for one in prompts})
        if answers.numbers:
            sys.stderr.write(f"{output} already has {counted(len(answers.numbers), 'answer')}\n")
        progress = Progress("answering", len(prompts), "answers", len(answers.numbers))
        left = [batch for batch in batches if any(prompt.number not in answers.numbers for prompt in batch)]
        return answers, progress, left, [*problems, *more]

    prepared = together(mesh, lambda: prepare() if mesh.rank == 0 else None)
    batches, problems = on_first(mesh, lambda: prepared and prepared[2:]) or ([], [])

    def keep(responses: Sequence[Response]) -> None:
        assert prepared is not None, "rank 0 has prepared"
        answers, progress, _, _ = prepared
        answers.add(_record(session, one) for one in responses)
        progress.update(len(answers.numbers) - progress.done)

    def close() -> tuple[str, ...]:
        assert prepared is not None, "rank 0 has prepared"
        answers, progress, _, _ = prepared
        progress.close()
        sys.stderr.write(f"{output} has {counted(len(answers.numbers), 'answer')}\n")
        answers.close()
        return tuple(dict.fromkeys(problems))

    problems = [*problems, *answer_batches(session, batches, keep, phase)]
    if found := on_first(mesh, close):
        raise AgreedError(found)


def _record(session: Session, response: Response) -> dict[str, Any]:
    prompt = response.prompt
    name = {} if prompt.name is None else {"id": prompt.name}
    return {"number": prompt.number, **name, "question": prompt.question, "answer": response.text,
            "ended": response.ended, "num_prompt_tokens": response.num_prompt_tokens,
            "num_answer_tokens": len(response.token_ids), "key": session.key(prompt)}
