"""One rank's training run: builds everything it needs in order, and runs the loop over the steps."""

from dataclasses import replace

from mm.batch import StepPlan
from mm.config.validation import asks
from mm.data.feed.keeper import FeatureKeeper
from mm.device.device import Device
from mm.errors import AgreedError
from mm.lock import Claim
from mm.model.dropout import seed_of
from mm.model.fingerprint import vision_fingerprint
from mm.model.stage import Stage
from mm.parallel import mesh as parallel
from mm.parallel.activity import Work
from mm.parallel.mesh import Mesh
from mm.parallel.watchdog import Watchdog
from mm.process import StopSignals
from mm.progress import ongoing
from mm.training.feed import Feed, open_feed
from mm.training.questions import QuestionSet
from mm.training.recorder import StepObserver
from mm.training.reporter import Reporter, say_on_last_rank
from mm.training.saver import Saver
from mm.training.start import Settled, start
from mm.training.step import step
from mm.training.stopping import Stop, Stopping, stop_text
from mm.training.update import Ballot, StepResult
from mm.training.validation import Validator
from mm.training.weight_check import check_weights

_FIRST_STEP = "the first step, in which kernels are compiled and the data workers start"


class Trainer:
    """Everything that one rank holds during a run."""

    def __init__(
        self, settled: Settled, device: Device, mesh: Mesh, watchdog: Watchdog, claim: Claim | None = None,
        signals: StopSignals | None = None,
    ) -> None:  # fmt: skip
        """Arguments:

        - ``claim``: this rank's locks on the directories that the run writes
        - ``signals``: what may stop the run after a step; None: nothing
        """
        self.run, self._schedule, run, args = settled.run, settled.schedule, settled.run, settled.run.args
        self.mesh, self._watchdog, self._say = mesh, watchdog, say_on_last_rank(mesh)
        self._samples, self._opened_questions = settled.samples, settled.questions
        stage = Stage(run.model, mesh, args.precision, device, args.loss_unit, run.num_pieces > 1, args.shards_weights)
        started = start(settled, stage, mesh, self._say)
        self.setup, self.progress = started.setup, started.progress
        watchdog.follow(stage.journal, self.setup.communicator)
        with ongoing("the checksum of the ViT", args.vision_feature_cache is not None and mesh.rank == 0):
            self.fingerprint = None if args.vision_feature_cache is None else vision_fingerprint(stage, mesh)
        self.reporter = Reporter(run, self.setup, self._schedule, self.progress.iteration, self._say)
        self.saver = Saver(
            run, self.setup, claim or Claim(), self._say, started.checkpoint, started.base, watchdog.phase,
            settled.disks)
        self._stopping = Stopping(signals or StopSignals(), args.exit_duration_in_mins, args.save is not None)
        self._ballot = Ballot(device)
        self._ended_early = False
        self._last_checked = 0
        """The step after which the ranks' weights were compared last; 0 before the first comparison."""

    def run_steps(self) -> None:
        """Train until ``--train-iters``, ``--exit-interval``, an early stop, or a reason in ``mm.training.stopping``;
        validate, ask questions and save when due.
        """
        first, last = self.progress.iteration + 1, self._last_iteration()
        if first > last:
            self._say(f"the checkpoint is at iteration {last} of {self.run.args.train_iters}: nothing to train")
            return
        observer = StepObserver(self.run.args, self.setup.stage, self.mesh, first, last, self._say)
        is_open = self._samples is not None  # else the index of the samples shows its own progress
        with self._watchdog.phase("data"), ongoing("opening the data", is_open and self.mesh.rank == 0):
            questions = self._questions(first, last)
            feed, keeper = self.feed(last - first + 1), self._keeper()
            validator = self._validator(feed)
        with observer.observing(), self._stopping.deferring(), self.saver.committing():
            for iteration in range(first, last + 1):
                if self._is_over:
                    break
                observer.begin(iteration)
                with ongoing(_FIRST_STEP, iteration == first and self.mesh.rank == 0):
                    plan, result = self._step(iteration, feed, keeper)
                epoch = feed.epoch(self.progress.consumed_samples)
                seconds, timers = observer.end(feed.plans.own_wait_seconds)
                with observer.paused():
                    compared = observer.compared(iteration)
                self.reporter.report_step(self.progress, plan, result, seconds, timers, epoch, compared)
                with observer.paused():
                    observer.write(iteration, plan)
                    if self.saver.is_written:
                        self.saver.commit()
                    if self._is_check_due(iteration):
                        self._check_weights()
                    if validator.is_due(iteration):
                        self._validate(validator, feed)
                    if questions is not None and questions.is_due(iteration):
                        self.reporter.report_scores(self.progress, questions.ask(iteration))
                    is_last = iteration == last or self._is_over
                    if self.saver.is_due(iteration, is_last):
                        self._check_weights()
                        self.saver.save(self.progress, is_last)
        self._end(feed, keeper)

    @property
    def stop(self) -> Stop | None:
        """Why ``run_steps`` has stopped before its last step; None if it has not."""
        return self._stopping.stop

    def export(self) -> None:
        """Write the model in Hugging Face format if requested, unless the run is unfinished or was asked to stop."""
        has_ended = self._ended_early or self.progress.iteration >= self.run.args.train_iters
        self.saver.export(self.progress, has_ended and self.stop is None)

    def close(self) -> None:
        """Close files and leave the process group.  Only after success, because it waits for all ranks."""
        self.reporter.close(self.progress.iteration, self._how_it_ends())
        parallel.stop()

    def _how_it_ends(self) -> str:
        iteration, total = self.progress.iteration, self.run.args.train_iters
        if self.stop is not None:
            return f"stopped by {self.stop.cause} after step {iteration:,} of {total:,}"
        if self._ended_early:
            return f"stopped early after step {iteration:,} of {total:,}: no lower validation loss"
        return f"all {total:,} steps are done" if iteration >= total else (
            f"stopped by --exit-interval after step {iteration:,} of {total:,}")

    def feed(self, num_steps: int) -> Feed:
        """Open the data for the next ``num_steps`` steps."""
        return open_feed(
            self.run, self.mesh, self.setup.stage, self.progress, num_steps, self.fingerprint, self._samples)

    # What the loop calls

    @property
    def _is_over(self) -> bool:
        return self._ended_early or self.stop is not None

    def _is_check_due(self, iteration: int) -> bool:
        """Whether to compare the ranks' weights after this step, even if nothing is saved."""
        interval = self.run.args.check_weights_interval
        return interval is not None and iteration % interval == 0

    def _check_weights(self) -> None:
        """With ``--check-weights-interval``, compare the ranks' weights, once a step; called before each save."""
        iteration = self.progress.iteration
        if self.run.args.check_weights_interval is not None and self._last_checked != iteration:
            check_weights(self.setup, iteration)
            self._last_checked = iteration

    def _last_iteration(self) -> int:
        """The last step of this launch: ``--train-iters``, or an earlier multiple of ``--exit-interval``."""
        args, first = self.run.args, self.progress.iteration
        if first >= args.train_iters:
            return first
        interval = args.exit_interval
        return args.train_iters if interval is None else min(args.train_iters, (first // interval + 1) * interval)

    def _questions(self, first: int, last: int) -> QuestionSet | None:
        """None if no step in this range asks questions."""
        is_asked = any(asks(self.run.args, iteration) for iteration in range(first, last + 1))
        return QuestionSet(self.run, self.setup, self._watchdog.phase, self._opened_questions) if is_asked else None

    def _keeper(self) -> FeatureKeeper | None:
        """The writer of the ViT feature cache, on ranks that have ViT features; else None."""
        args, mesh = self.run.args, self.mesh
        if args.vision_feature_cache is None or not self.setup.stage.gives_features:
            return None
        gib = args.vision_feature_cache_gib
        max_bytes = None if gib is None else int(gib * 2**30)
        return FeatureKeeper(args.vision_feature_cache, mesh.rank, max_bytes, mesh.dp_size * mesh.context.num_encoders)

    def _validator(self, feed: Feed) -> Validator:
        validator = Validator(self.run.args, self.setup, self._watchdog, feed.validation, self._say)
        self.progress = replace(self.progress, data=feed.trained_on, best=validator.begin(self.progress.best))
        self._ended_early = validator.ends(self.progress.best)
        return validator

    def _step(self, iteration: int, feed: Feed, keeper: FeatureKeeper | None) -> tuple[StepPlan, StepResult]:
        """Train one step, and advance ``progress`` to ``iteration``."""
        args = self.run.args
        self.saver.weights_change()
        with self._watchdog.step(iteration):
            with self.setup.stage.journal.during(Work.DATA):
                self._watchdog.plan = plan = next(feed.plans)
            if self.run.model.lora.dropout:
                plan = replace(plan, dropout_seed=seed_of(self.run.args.seed, iteration))
            try:
                lr, recent = self._schedule.at(self.progress.consumed_samples), self.progress.recent
                max_norm = None if args.skip_bad_steps is None else recent.max_norm(args.spike_factor)
                votes = self._ballot.of([*self._stopping.votes(), self.saver.is_writing])
                result = step(self.setup, plan, lr, votes, max_norm)
                self.reporter.report_spike(iteration, plan, result, recent.spike(result, args.spike_factor))
                recent = recent.after(result, args.skip_bad_steps or 0)
            except AgreedError as error:
                raise AgreedError(f"iteration {iteration}: {problem}" for problem in error.problems) from error
            *stops, num_writing = result.votes
            self._stopping.decide(stops)
            self.saver.decide(num_writing)
            consumed = self.progress.consumed_samples + self.run.global_batch_size
            self.progress = replace(self.progress, iteration=iteration, consumed_samples=consumed, recent=recent)
            if keeper is not None:
                keeper.keep(self.setup.stage.take_features())
        return plan, result

    def _validate(self, validator: Validator, feed: Feed) -> None:
        iteration = self.progress.iteration
        found = validator.validate(feed.plans, iteration)
        self.progress = replace(self.progress, best=self.progress.best.after(found.loss, iteration))
        self.reporter.report_validation(self.progress, found)
        if self.saver.is_best(self.progress):
            self._check_weights()
            self.saver.save_best(self.progress)
        self._ended_early = validator.ends(self.progress.best)

    def _end(self, feed: Feed, keeper: FeatureKeeper | None) -> None:
        """Close the data after success.  After an error nothing waits, because threads of other ranks may be gone."""
        feed.plans.close()
        if keeper is not None:
            keeper.close()
        if self.stop is not None:
            args = self.run.args
            self._say(stop_text(self.stop, self.progress.iteration, args.train_iters, args.save))
        elif self._ended_early:
            best = self.progress.best
            self._say(f"stopped early after iteration {self.progress.iteration} of {self.run.args.train_iters}: the "
                      f"last {best.num_since} validations had no lower loss than iteration {best.iteration} "
                      f"(--early-stopping-patience {self.run.args.early_stopping_patience})")
