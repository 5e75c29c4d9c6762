"""Scoring, top to bottom: flags and JSON -> questions -> weights -> answers -> scores, page and the peer's files.

Run by ``python -m mm.evaluate FLAGS`` in one process, or by ``torchrun ... -m mm.evaluate FLAGS`` on any layout.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm.config.evaluate import EVALUATE, Evaluating, load_evaluating
from mm.config.generate import kept_answers
from mm.console import loading, ongoing
from mm.process import end_with_launcher, is_first_rank, run_command, status_of

if TYPE_CHECKING:
    from mm.generation.session import Session
    from mm.scoring.benchmarks import Items

PAGE = "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and return the exit status: 0, 2 after reporting every mistake of the user, or 130 after Ctrl-C."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _run(words), lambda: kept_answers(EVALUATE, words), is_rank=True)


def _run(words: Sequence[str]) -> int:
    end_with_launcher()
    evaluating = load_evaluating(words)
    return status_of(lambda: evaluate(evaluating))


def evaluate(evaluating: Evaluating) -> int:
    """Ask and score on this process's device, as one rank of the launcher's world; returns the exit status, 0."""
    with loading(is_first_rank()):
        from mm.generation.setup import opened

    read: list[Items] = []  # on rank 0; the other ranks have no use for the questions

    def read_questions() -> tuple[str, ...]:
        from mm.scoring.questions import read_items

        with ongoing("reading the questions"):
            read.append(read_items(evaluating))
        return read[0].notes

    with opened(evaluating.asking, read_questions) as (session, phase):
        from mm.generation.answers import answer_file
        from mm.generation.prompts import Prompt
        from mm.parallel.agreement import on_first
        from mm.scoring.results import ANSWERS, check_settings

        settings = _settings(evaluating, session)
        on_first(session.mesh, lambda: check_settings(Path(evaluating.output), settings))
        answer_file(session, lambda: (
            [Prompt(number, item.sample, item.index) for number, item in enumerate(read[0].items)], []),
            str(Path(evaluating.output) / ANSWERS), evaluating.asking.args.batch_size, phase)
        on_first(session.mesh, lambda: _finish(evaluating, read[0], settings))
    return 0


def _settings(evaluating: Evaluating, session: "Session") -> dict[str, Any]:
    """Everything that the scores depend on besides the questions."""
    args = evaluating.asking.args
    media = asdict(session.media)
    return {
        "benchmark": evaluating.benchmark, "rule": evaluating.rule, "questions": evaluating.questions,
        "max_questions": args.max_questions, "use_custom_prompt": evaluating.custom_prompt,
        "load": args.load, "weights": session.weights, "precision": args.precision,
        "decoding": asdict(session.decoding),
        "media": {name: value for name, value in media.items() if name.startswith(("image_", "video_"))},
    }


def _finish(evaluating: Evaluating, items: "Items", settings: dict[str, Any]) -> None:
    """Write scores, page and files, and print the scores."""
    from mm.scoring import results
    from mm.scoring.questions import title_of

    folder = Path(evaluating.output)
    answers = results.read_answers(folder / results.ANSWERS)
    found, scores = results.write_results(folder, items, title_of(evaluating), answers)
    results.write_text(folder / PAGE, results.results_page(scores, settings, found))
    if evaluating.peer_model is not None:
        results.write_peer_files(folder, evaluating.peer_model, evaluating.peer_dataset, items.rule, found)
    print(results.report(scores).text(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
