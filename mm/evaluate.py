"""Scoring, top to bottom: flags and JSON -> questions -> weights -> answers -> scores, page and the peer's files.

Run by ``python -m mm.evaluate FLAGS`` in one process, or by ``torchrun ... -m mm.evaluate FLAGS`` on any layout.  With
``--check`` it needs no launcher, and no device but one given by name.
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mm.config.evaluate import EVALUATE, Evaluating, load_evaluating
from mm.config.generate import kept_answers
from mm.config.notes import notes_at_start, sorted_notes
from mm.ending import end_with_launcher, is_first_rank, print_notes, print_notes_once, run_command, status_of
from mm.progress import Progress, loading, ongoing
from mm.version import software

if TYPE_CHECKING:
    from mm.data.sample import Sample
    from mm.generation.prompts import Prompt
    from mm.generation.session import Session
    from mm.generation.source import ModelFiles
    from mm.scoring.benchmarks import Items

PAGE = "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and return the exit status: 0, 2 after reporting every mistake that the user can fix, or 130 after
    Ctrl-C."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _run(words), lambda: kept_answers(EVALUATE, words), is_rank=True)


def _run(words: Sequence[str]) -> int:
    end_with_launcher()
    evaluating = load_evaluating(words)
    if evaluating.asking.args.check:
        check(evaluating)
        return 0
    return status_of(lambda: evaluate(evaluating))


def check(evaluating: Evaluating) -> None:
    """Print all notes, and that everything is in order; raises UserError with all problems.  Needs no device."""
    with loading():
        from mm.generation.rehearsal import ALL_IN_ORDER, rehearse
        from mm.scoring.questions import read_items

    notes: list[str] = []
    with TemporaryDirectory() as folder:

        def read() -> "tuple[Iterator[Sample], list[str]]":
            items = read_items(evaluating)
            notes.extend(items.notes)
            return (sample for _, sample, _ in items.as_prompts(Path(folder))), []

        found = rehearse(evaluating.asking, read, evaluating.output)
    print_notes(sorted_notes((*evaluating.asking.notes, *notes, *found.notes)), sys.stderr)
    print(ALL_IN_ORDER)


def evaluate(evaluating: Evaluating) -> int:
    """Ask and score on this process's device, as one rank of the launcher's world; returns the exit status, 0."""
    with loading(is_first_rank()):
        from mm.generation.source import find
        from mm.parallel.rendezvous import Rendezvous
        from mm.parallel.watchdog import Watchdog
        from mm.scoring.questions import read_items

    args = evaluating.asking.args
    with Watchdog(Rendezvous.of_launcher(args.distributed_timeout_minutes), None, facts=software()) as watchdog:
        with watchdog.phase("check"):
            with ongoing("reading the questions", is_first_rank()):
                items = read_items(evaluating) if is_first_rank() else None  # the other ranks have no use for them
            found = find(evaluating.asking) if is_first_rank() else None  # one rank reports what all of them would
        with ongoing("waiting for the other ranks", is_first_rank()):
            store = watchdog.meet()
        found = found or find(evaluating.asking)
        if items is not None:
            print_notes(notes_at_start((*evaluating.asking.notes, *items.notes, *found.notes)), sys.stderr)
        with loading(is_first_rank(), "starting the device"):
            from mm.device.device import Device

            device = Device.pick(args.device)
            print_notes_once(device.notes)
            # megatron looks at the device while it is imported, so everything built on it comes after this
            from mm.generation.batches import FileOfPrompts
            from mm.generation.session import Session
            from mm.parallel import mesh as parallel
            from mm.parallel.agreement import on_first
            from mm.scoring.results import ANSWERS, check_settings

        with ongoing("connecting the ranks", is_first_rank()):
            mesh = parallel.start(
                device, found.model, args.tensor_model_parallel_size, args.distributed_timeout_minutes, store=store)
        watchdog.place(mesh)
        with watchdog.phase("load"):
            session = Session.open(evaluating.asking, found, device, mesh)
        settings = _settings(evaluating, session, found)
        on_first(mesh, lambda: check_settings(Path(evaluating.output), settings))
        answers = str(Path(evaluating.output) / ANSWERS)
        FileOfPrompts(
            session, lambda: (_prompts(evaluating, items), []), answers, args.batch_size, watchdog.phase).answer()
        on_first(mesh, lambda: _finish(evaluating, items, settings))
    parallel.stop()
    return 0


def _settings(evaluating: Evaluating, session: "Session", found: "ModelFiles") -> dict[str, Any]:
    """Everything that the scores depend on besides the questions."""
    args = evaluating.asking.args
    media = asdict(session.media)
    return {
        "benchmark": evaluating.benchmark, "rule": evaluating.rule, "questions": evaluating.questions,
        "max_questions": args.max_questions, "use_custom_prompt": evaluating.custom_prompt,
        "load": args.load, "weights": found.fingerprint, "precision": args.precision,
        "decoding": asdict(session.decoding),
        "media": {name: value for name, value in media.items() if name.startswith(("image_", "video_"))},
    }


def _prompts(evaluating: Evaluating, items: "Items | None") -> "list[Prompt]":
    """The questions as prompts, with their images as files that every rank can read."""
    from mm.generation.prompts import in_order
    from mm.scoring.results import PICTURES

    assert items is not None, "rank 0 has read them"
    folder = Path(evaluating.output) / PICTURES
    folder.mkdir(exist_ok=True)
    shown = Progress("writing the pictures of the questions", len(items.items), "questions")
    return in_order(shown.each(items.as_prompts(folder)))


def _finish(evaluating: Evaluating, items: "Items | None", settings: dict[str, Any]) -> None:
    """Write scores, page and files, and print the scores."""
    from mm.scoring.page import report, results_page
    from mm.scoring.peer_files import write_peer_files
    from mm.scoring.questions import title_of
    from mm.scoring.results import ANSWERS, PICTURES, read_answers, write_results, write_text

    assert items is not None, "rank 0 has read them"
    folder = Path(evaluating.output)
    with ongoing("scoring the answers"):
        found, scores = write_results(folder, items, title_of(evaluating), read_answers(folder / ANSWERS))
        write_text(folder / PAGE, results_page(scores, settings, found))
        if evaluating.peer_model is not None:
            write_peer_files(folder, evaluating.peer_model, evaluating.peer_dataset, items.rule, found)
        shutil.rmtree(folder / PICTURES)
    print(report(scores).text(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
