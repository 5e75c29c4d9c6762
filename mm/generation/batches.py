"""A file of prompts answered into a file of answers: batch by batch, over all replicas, and again after interruptions.

The batches are a function of the prompts alone, so that a run that was killed and started again makes each answer in
the company in which it would have been made.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mm.errors import AgreedError, UserError
from mm.generation.answers import AnswerFile
from mm.generation.prompts import Prompt, read_prompts
from mm.generation.session import Session, Told
from mm.parallel.agreement import gather, on_first


@dataclass(frozen=True)
class Plan:
    """What is asked."""

    batches: tuple[tuple[Prompt, ...], ...]
    """Those that are not all answered yet; the longest prompts first, so that too little memory is noticed at once."""
    problems: tuple[str, ...]
    """Of prompts that cannot be asked."""


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Numbers of the prompts of each batch: prompts of like ``lengths`` together, the longest first."""
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


class FileOfPrompts:
    """The prompts of one file, and the file of their answers, which rank 0 alone opens."""

    def __init__(self, session: Session, path: str, output: str, media_roots: Sequence[str], batch_size: int) -> None:
        self._session, self._path, self._output = session, path, output
        self._media_roots, self._batch_size = media_roots, batch_size
        self._answers: AnswerFile | None = None

    def answer(self) -> None:
        """Every rank calls it.  Raises AgreedError at the end with what is wrong with prompts that have no answer."""
        session, mesh = self._session, self._session.mesh
        plan = on_first(mesh, self._plan)
        problems = list(plan.problems)
        for first in range(0, len(plan.batches), mesh.dp_size):
            number = first + mesh.dp_rank
            batch = plan.batches[number] if number < len(plan.batches) else ()
            told, found = session.respond(batch)
            everything = gather(mesh, (told, found if mesh.owns_data else ()))
            on_first(mesh, lambda everything=everything: self._write([one for told, _ in everything for one in told]))
            problems += [problem for _, some in everything for problem in some]
        found = on_first(mesh, lambda: self._close(problems))
        if found:
            raise AgreedError(found)

    def _plan(self) -> Plan:
        prompts, problems = read_prompts(self._path, self._media_roots)
        lengths: list[int] = []
        ready: list[Prompt] = []
        for prompt in prompts:
            try:
                lengths.append(self._session.length(prompt))
                ready.append(prompt)
            except UserError as error:
                problems += error.problems
        self._answers = AnswerFile(self._output, {one.number: self._session.key(one) for one in prompts})
        batches = [[ready[number] for number in batch] for batch in by_length(lengths, self._batch_size)]
        done = self._answers.numbers
        left = [batch for batch in batches if any(prompt.number not in done for prompt in batch)]
        if done:
            _say(f"{self._output} has {len(done)} answers already")
        if problems:
            _say(f"{len(prompts) - len(ready)} prompts cannot be asked; the end of this run says why")
        return Plan(tuple(map(tuple, left)), tuple(problems))

    def _write(self, told: Sequence[Told]) -> None:
        assert self._answers is not None, "rank 0 has opened it"
        self._answers.add(self._record(one) for one in told)
        _say(f"{len(self._answers.numbers)} answers are in {self._output}")

    def _record(self, told: Told) -> dict[str, Any]:
        prompt = told.prompt
        name = {} if prompt.name is None else {"id": prompt.name}
        return {"number": prompt.number, **name, "question": prompt.question, "answer": told.text, "ended": told.ended,
                "num_prompt_tokens": told.num_prompt_tokens, "num_answer_tokens": len(told.token_ids),
                "key": self._session.key(prompt)}

    def _close(self, problems: Sequence[str]) -> tuple[str, ...]:
        assert self._answers is not None, "rank 0 has opened it"
        self._answers.close()
        return tuple(dict.fromkeys(problems))


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
