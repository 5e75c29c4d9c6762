"""One rank's training run: everything it needs is built in order, and then its loop goes over the steps."""

from dataclasses import replace

from mm.batch import StepPlan
from mm.config.rules import asks
from mm.config.run import Run
from mm.console import ongoing
from mm.data.loader.feature_writer import FeatureWriter, vision_fingerprint
from mm.device.device import Device
from mm.errors import AgreedError
from mm.lock import Claim
from mm.model.layers.lora_linear import seed_of
from mm.model.stage import Stage
from mm.parallel import mesh as parallel
from mm.parallel.activity import Work
from mm.parallel.health.watchdog import Watchdog
from mm.parallel.mesh import Mesh
from mm.process import StopSignals
from mm.run.checkpoint.disks import find_disks
from mm.run.checkpoint.save import Saver
from mm.run.optim.update import votes_on
from mm.run.progress import StepResult, say_on_last_rank
from mm.run.sources import Checked
from mm.run.start import Feed, decided_by_first_rank, exportable, open_feed, open_sources, start
from mm.run.step import step
from mm.run.stopping import Stop, Stopping
from mm.run.validation import QuestionSet, Validator
from mm.run.watch.metrics import Reporter
from mm.run.watch.step_timing import StepTiming
from mm.run.watch.watcher import Profile, Timers, Watch, Watcher

_FIRST_STEP = "the first step, in which kernels are compiled and the data workers start"


class Trainer:
    """Everything that one rank holds during a run."""

    def __init__(
        self, run: Run, checked: Checked | None, device: Device, mesh: Mesh, watchdog: Watchdog,
        claim: Claim | None = None, signals: StopSignals | None = None,
    ) -> None:  # fmt: skip
        """Arguments:

        - ``run``: as this machine's command line has it; rank 0 decides what the files change in it
        - ``checked``: on rank 0, what the check before the run has found and opened; None on the others
        - ``claim``: this rank's locks on the directories that the run writes
        - ``signals``: what may stop the run after a step; None: nothing
        """
        self.mesh, self._watchdog, self._say = mesh, watchdog, say_on_last_rank(mesh)
        self.run, self._schedule, checkpoint = decided_by_first_rank(run, checked, mesh)
        self.samples, self._opened_questions = (checked.samples, checked.questions) if checked else (None, None)
        run, args = self.run, self.run.args
        disks = find_disks(args, mesh)
        sources = open_sources(run, checked, checkpoint, mesh, disks, self._say)
        stage = Stage(run.model, mesh, args.precision, device, args.loss_unit, run.num_pieces > 1, args.shards_weights)
        self.setup, self.progress = start(run, self._schedule, sources, stage, mesh, self._say)
        watchdog.follow(stage.journal, self.setup.communicator)
        with ongoing("the checksum of the ViT", args.vision_feature_cache is not None and mesh.rank == 0):
            self.fingerprint = None if args.vision_feature_cache is None else vision_fingerprint(stage, mesh)
        self.reporter = Reporter(run, self.setup, self._schedule, self.progress.iteration, self._say)
        self.saver = Saver(run, self.setup, claim or Claim(), self._say, watchdog.phase, disks, self.progress.iteration,
                           exportable(run, sources))
        self._stopping = Stopping(signals or StopSignals(), args.exit_duration_in_mins, args.save is not None)
        self._validates = False  # until the data are open

    def run_steps(self) -> None:
        """Train until ``--train-iters`` or ``--exit-interval``, an early stop, a signal, or the end of the time."""
        first, last = self.progress.iteration + 1, self._last_iteration()
        if first > last:
            self._say(f"the checkpoint is at iteration {last} of {self.run.args.train_iters}: nothing to train")
            return
        is_open = self.samples is not None  # else the index of the samples shows its own progress
        with self._watchdog.phase("data"), ongoing("opening the data", is_open and self.mesh.rank == 0):
            questions, watch = self._questions(first, last), self._watch(first, last)
            feed, feature_writer = self.feed(last - first + 1), self._feature_writer()
            validator = Validator(self.run.args, self.setup, self._watchdog, feed, self.reporter, self._say)
            self.progress = validator.begin(replace(self.progress, data=feed.trained_on))
            self._validates = feed.validation is not None
        with watch.watching(), self._stopping.deferring(), self.saver.committing():
            for iteration in range(first, last + 1):
                if self._is_over:
                    break
                watch.before(iteration)
                with ongoing(_FIRST_STEP, iteration == first and self.mesh.rank == 0):
                    plan, result = self._step(iteration, feed, feature_writer)
                epoch = feed.epoch(self.progress.consumed_samples)
                self.reporter.report_step(
                    watch.after(self.progress, plan, result, epoch, feed.plans.own_wait_seconds))
                with watch.paused():
                    self.saver.finish(num_writing=result.votes[-1])
                    self.progress = validator.after(self.progress)
                    if questions is not None:
                        questions.after(self.progress)
                    self.saver.after(self.progress, is_last=iteration == last or self._is_over)
        watch.close(self.progress.iteration)
        feed.plans.close()  # after an error nothing waits, because threads of other ranks may be gone
        if feature_writer is not None:
            feature_writer.close()
        if self._is_over:
            save = self.run.args.save
            kept = "nothing is kept, because there is no --save" if save is None else (
                f"continue from it with --load {save}")
            self._say(self._how_it_ends() + (f": {kept}" if self.stop is not None else ""))

    def _step(self, iteration: int, feed: Feed, feature_writer: FeatureWriter | None) -> tuple[StepPlan, StepResult]:
        """Train one step, and advance ``progress`` to ``iteration``."""
        args, recent, journal = self.run.args, self.progress.recent, self.setup.stage.journal
        with self._watchdog.step(iteration):
            with journal.during(Work.DATA):
                self._watchdog.plan = plan = next(feed.plans)
            if self.run.model.lora.dropout:
                plan = replace(plan, dropout_seed=seed_of(args.seed, iteration))
            try:
                lr = self._schedule.at(self.progress.consumed_samples)
                max_norm = None if args.skip_bad_steps is None else recent.max_norm(args.spike_factor)
                votes = votes_on(self.setup.stage.device, [*self._stopping.votes(), self.saver.is_writing])
                result = step(self.setup, plan, lr, votes, max_norm)
                self.reporter.report_spike(iteration, plan, result, recent.spike(result, args.spike_factor))
                recent = recent.after(result, args.skip_bad_steps or 0)
            except AgreedError as error:
                raise AgreedError(f"iteration {iteration}: {problem}" for problem in error.problems) from error
            self._stopping.decide(result.votes[:-1])
            consumed = self.progress.consumed_samples + self.run.global_batch_size
            self.progress = replace(self.progress, iteration=iteration, consumed_samples=consumed, recent=recent)
            if feature_writer is not None:
                feature_writer.enqueue(self.setup.stage.take_features())
        return plan, result

    def export(self) -> None:
        """Write the model in Hugging Face format if requested, unless the run is unfinished or was asked to stop."""
        has_ended = self._has_ended_early or self.progress.iteration >= self.run.args.train_iters
        self.saver.export(self.progress, has_ended and self.stop is None)

    def close(self) -> None:
        """Close files and leave the process group.  Only after success, because it waits for all ranks."""
        self.reporter.close(self.progress.iteration, self._how_it_ends())
        parallel.stop()

    @property
    def stop(self) -> Stop | None:
        """Why ``run_steps`` has stopped before its last step; None if it has not."""
        return self._stopping.stop

    @property
    def _has_ended_early(self) -> bool:
        """Whether ``--early-stopping-patience`` ends the run; the same on every rank, because losses are."""
        patience = self.run.args.early_stopping_patience
        return patience is not None and self._validates and self.progress.best.num_since >= patience

    @property
    def _is_over(self) -> bool:
        return self._has_ended_early or self.stop is not None

    def _last_iteration(self) -> int:
        """The last step of this launch: ``--train-iters``, or an earlier multiple of ``--exit-interval``."""
        args, first = self.run.args, self.progress.iteration
        if first >= args.train_iters:
            return first
        interval = args.exit_interval
        return args.train_iters if interval is None else min(args.train_iters, (first // interval + 1) * interval)

    def feed(self, num_steps: int) -> Feed:
        """Open the data for the next ``num_steps`` steps."""
        return open_feed(
            self.run, self.mesh, self.setup.stage, self.progress, num_steps, self.fingerprint, self.samples)

    def _watch(self, first: int, last: int) -> Watch:
        args, stage = self.run.args, self.setup.stage
        timing = StepTiming(self.mesh, stage.device, args.log_interval, args.slow_rank_share,
                            args.log_style == "megatron")
        watchers: list[Watcher] = [timing, Timers(args, stage, self.mesh, self._say)]
        if args.profile:
            watchers.append(Profile(args, stage.device, self.mesh.rank, first, last, self._say))
        return Watch(watchers, stage.journal, [timing] if self.mesh.world_size > 1 else [])

    def _questions(self, first: int, last: int) -> QuestionSet | None:
        """None if no step in this range asks questions."""
        is_asked = any(asks(self.run.args, iteration) for iteration in range(first, last + 1))
        return QuestionSet(self.run, self.setup, self._watchdog.phase, self._opened_questions,
                           self.reporter) if is_asked else None

    def _feature_writer(self) -> FeatureWriter | None:
        """The writer of the ViT feature cache, on ranks that have ViT features; else None."""
        args, mesh = self.run.args, self.mesh
        if args.vision_feature_cache is None or not self.setup.stage.gives_features:
            return None
        gib = args.vision_feature_cache_gib
        max_bytes = None if gib is None else int(gib * 2**30)
        return FeatureWriter(args.vision_feature_cache, mesh.rank, max_bytes, mesh.dp_size * mesh.context.num_encoders)

    def _how_it_ends(self) -> str:
        args, best = self.run.args, self.progress.best
        place = f"after iteration {self.progress.iteration} of {args.train_iters}"
        if self.stop is not None:
            return f"stopped by {self.stop.cause} {place}"
        if self._has_ended_early:
            return (f"stopped early {place}: the last {best.num_since} validations had no lower loss than iteration "
                    f"{best.iteration} (--early-stopping-patience {args.early_stopping_patience})")
        return f"all {args.train_iters} iterations are done" if self.progress.iteration >= args.train_iters else (
            f"stopped by --exit-interval {place}")
