"""Validation in training: the loss per target token over exactly the validation samples, equal in every layout, and a
small set of questions that the model answers, scored as in ``mm.evaluate``."""

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from mm.batch import StepPlan
from mm.config.args import Arguments
from mm.config.evaluate import evaluating_in_training
from mm.config.rules import asks, is_due
from mm.config.run import Run
from mm.console import Progress
from mm.errors import refuse, writing
from mm.files import write_whole
from mm.generation.answers import answer_batches, in_batches
from mm.generation.prompts import Prompt
from mm.generation.session import Response, Session, read_encoder, with_stop_tokens
from mm.generation.setup import settings_in
from mm.page import thumbnail_path
from mm.parallel.activity import Work
from mm.parallel.agreement import all_of, on_first, together
from mm.parallel.health.watchdog import Phase, Watchdog
from mm.parallel.mesh import for_prompts
from mm.run.progress import Say, TrainingProgress
from mm.run.sources import Questions
from mm.run.start import Feed
from mm.run.step import Setup, forward
from mm.run.watch.metrics import Reporter, ScoreMetrics, ValidationMetrics
from mm.scoring.benchmarks import Items
from mm.scoring.questions import read_items, title_of
from mm.scoring.results import Prediction, thumbnails, write_results


class Validator:
    """The validations of a run."""

    def __init__(
        self, args: Arguments, setup: Setup, watchdog: Watchdog, feed: Feed, reporter: Reporter, say: Say
    ) -> None:
        self._args, self._setup, self._watchdog, self._reporter, self._say = args, setup, watchdog, reporter, say
        self._plan, self._plans = feed.validation, feed.plans

    def begin(self, progress: TrainingProgress) -> TrainingProgress:
        """Before the first step: reset the lowest loss if the samples changed."""
        plan = self._plan
        if plan is None:
            return progress
        best = progress.best.of(plan.fingerprint)
        if progress.best.loss is not None and best.loss is None:
            self._say("note: the validation samples changed: best loss reset")
        if plan.num_samples < plan.num_of_all:
            self._say(f"note: a validation uses {plan.num_samples} of {plan.num_of_all} samples, the same each time "
                      f"(--eval-iters {self._args.eval_iters})")
        return replace(progress, best=best)

    def after(self, progress: TrainingProgress) -> TrainingProgress:
        """Validate and report, if due after this step; the progress with the lowest loss so far."""
        plan, iteration = self._plan, progress.iteration
        if plan is None or not is_due(self._args, iteration):
            return progress
        started = time.perf_counter()
        loss, num_samples, num_target_tokens = validate(
            self._setup, self._plans, plan.num_plans, self._watchdog, iteration)
        best = progress.best.after(loss, iteration)
        self._reporter.report_validation(ValidationMetrics(
            iteration=iteration, consumed_samples=progress.consumed_samples, validation_loss=loss,
            num_samples=num_samples, num_target_tokens=num_target_tokens,
            validation_seconds=time.perf_counter() - started, best_validation_loss=best.loss,
            best_iteration=best.iteration))
        return replace(progress, best=best)


def validate(
    setup: Setup, data: Iterator[StepPlan], num_plans: int, watchdog: Watchdog, iteration: int
) -> tuple[float | None, int, int]:
    """The loss of the current weights over the next ``num_plans`` plans of ``data``, and their numbers of samples and
    tokens that count.  The loss is None if it is not finite, or there is no target token.

    Losses of microbatches are added exactly, so it does not matter which replica computes which.
    """
    total: Fraction | None = Fraction(0)
    num_samples = num_target_tokens = 0
    counts = setup.mesh.tp_rank == 0 and any(chunk.spec.has_head for chunk in setup.stage.chunks)
    shown = Progress("validating", num_plans, "steps", is_shown=setup.mesh.rank == 0)
    with evaluating(setup):
        for _ in shown.each(range(num_plans)):
            with watchdog.step(iteration, "validation"):
                with setup.stage.journal.during(Work.DATA):
                    watchdog.plan = plan = next(data)
                losses = forward(setup, plan).tolist()  # waits for the device
            num_samples += plan.totals.num_target_samples
            num_target_tokens += plan.totals.num_target_tokens
            total = _added(total, losses if counts else [])
    sums = [value for _, value in all_of(((setup.mesh.rank, total),), setup.mesh.control_group)]
    is_known = num_target_tokens > 0 and None not in sums
    loss = float(sum(value for value in sums if value is not None) / num_target_tokens) if is_known else None
    return loss, num_samples, num_target_tokens


def _added(total: Fraction | None, values: list[float]) -> Fraction | None:
    """``total`` plus ``values``; None once a value is not finite."""
    if total is None or not all(map(math.isfinite, values)):
        return None
    return total + sum(map(Fraction, values))


@contextmanager
def evaluating(setup: Setup) -> Iterator[None]:
    """Switch the modules to evaluation mode, with the gathered weights of the last update."""
    setup.finish_gathering()
    for model in setup.models:
        model.eval()
    try:
        yield
    finally:
        for model in setup.models:
            model.train()


class QuestionSet:
    """The questions, on rank 0, and the model in training."""

    def __init__(self, run: Run, setup: Setup, phase: Phase, opened: Questions | None, reporter: Reporter) -> None:
        """``phase`` guards each batch; ``opened`` is what the check before the run has opened on this rank.  Raises
        UserError, the same on every rank."""
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
                    self._answers |= {one.prompt.number: Prediction(one.text, one.ended == "length")
                                      for one in answered}
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
