"""A small set of questions that the model answers during training, scored as in ``mm.evaluate``."""

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mm.config.evaluate import evaluating_in_training
from mm.config.run import Run
from mm.config.validation import asks
from mm.errors import refuse, writing
from mm.files import write_whole
from mm.generation.batches import answer_batches, in_batches
from mm.generation.prompts import Prompt
from mm.generation.session import Response, Session, read_encoder, with_stop_tokens
from mm.generation.source import settings_in
from mm.page.record import thumbnail_path
from mm.parallel.agreement import on_first, together
from mm.parallel.health.watchdog import Phase
from mm.parallel.mesh import for_prompts
from mm.progress import Progress
from mm.run.progress import TrainingProgress
from mm.run.sources import Questions
from mm.run.step import Setup
from mm.run.validation import evaluating
from mm.run.watch.metrics import ScoreMetrics
from mm.run.watch.reporter import Reporter
from mm.scoring.benchmarks import Items
from mm.scoring.page import thumbnails
from mm.scoring.questions import read_items, title_of
from mm.scoring.results import Prediction, write_results


class QuestionSet:
    """The questions, on rank 0, and the model in training."""

    def __init__(self, run: Run, setup: Setup, phase: Phase, opened: Questions | None, reporter: Reporter) -> None:
        """``phase`` guards each batch; ``opened`` is what the check before the run has opened on this rank.

        Raises UserError, the same on every rank.
        """
        self._run, self._setup, self._phase, self._reporter = run, setup, phase, reporter
        self._asked = asked = evaluating_in_training(run.args, run.data, run.world_size)
        args, model, directory = run.args, run.model, run.data.model_name_or_path
        mesh = for_prompts(setup.mesh, setup.stage.has_patch_embedding, args.distributed_timeout_minutes)
        items = opened and opened.items
        self._items = together(mesh, lambda: items or read_items(asked) if mesh.rank == 0 else None)
        media = asked.asking.media_config(directory)
        encoder = read_encoder(media, model, mesh, opened and opened.encoder)
        stated = asked.asking.decoding(settings_in(Path(directory)))
        decoding = with_stop_tokens(stated, (), encoder, model.language, mesh)
        self._session = Session(setup.stage, mesh, encoder, media, decoding)
        self._answers: dict[int, Prediction] = {}
        self._has_thumbnails = False

    def after(self, progress: TrainingProgress) -> None:
        """Ask all questions if they are due after this step, and report the scores."""
        if not asks(self._run.args, progress.iteration):
            return
        started = time.perf_counter()
        scores = self.ask(progress.iteration)
        of_all = scores["headline"]
        self._reporter.report_score(ScoreMetrics(
            iteration=progress.iteration, consumed_samples=progress.consumed_samples,
            validation_score_percent=of_all["score_percent"], num_questions=of_all["num_questions"],
            num_truncated_answers=scores["num_truncated_answers"], answer_seconds=time.perf_counter() - started,
        ), scores["benchmark"])

    def ask(self, iteration: int) -> dict[str, Any]:
        """Ask all questions, write predictions and scores to a folder of this iteration, and return the scores.

        Called on every rank; does not change the training.  Raises AgreedError with the problems of questions that can
        no longer be asked.
        """
        session = self._session
        folder = Path(self._asked.output) / f"iter_{iteration:07d}"
        batches, problems = on_first(session.mesh, lambda: self._prepared(folder))
        with ExitStack() as asking:
            asking.enter_context(evaluating(self._setup))
            with self._phase("answers"):
                asking.enter_context(self._setup.stage.all_whole())
            with Progress("answering", sum(map(len, batches)), "questions", is_shown=session.mesh.rank == 0) as shown:

                def keep(answered: Sequence[Response]) -> None:
                    self._answers |= {one.prompt.number: Prediction.of(one.text, one.ended) for one in answered}
                    shown.update(len(answered))

                problems += answer_batches(session, batches, keep, self._phase)
        return on_first(session.mesh, lambda: self._finish(folder, problems))

    def _prepared(self, folder: Path) -> tuple[list[tuple[Prompt, ...]], list[str]]:
        """On rank 0: the questions in batches.  An earlier run's folder is deleted."""
        assert self._items is not None, "rank 0 has read them"
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        if self._run.args.page and not self._has_thumbnails:
            self._write_thumbnails(self._items)
        self._answers.clear()
        prompts = [Prompt(number, item.sample, item.index) for number, item in enumerate(self._items.items)]
        return in_batches(self._session, prompts, self._asked.asking.args.batch_size)

    def _write_thumbnails(self, items: Items) -> None:
        """Write small copies of the images, for the page of the run."""
        folder = Path(self._asked.output)
        for number, image, content in thumbnails(items):
            path = thumbnail_path(folder, number, image)
            with writing(path, "--log-dir"):
                write_whole(path, content)
        self._has_thumbnails = True

    def _finish(self, folder: Path, problems: Sequence[str]) -> dict[str, Any]:
        assert self._items is not None, "rank 0 has read them"
        refuse(problems)
        return write_results(folder, self._items, title_of(self._asked), self._answers)[1]
