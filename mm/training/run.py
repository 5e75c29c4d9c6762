"""One rank's training run: builds its parts in order, then steps, logs, saves and exports."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint import convert
from checkpoint.adapters import export_peft, merge, open_base, open_saved
from checkpoint.formats.training import remove
from mm.batch import StepPlan
from mm.config.run import Run, resolved
from mm.config.validation import asks, is_due, validates
from mm.data.contents import TrainedOn
from mm.data.dataset import Dataset
from mm.data.features import FeatureCache
from mm.data.gauge import Gauge
from mm.data.loader import StepLoader
from mm.data.order import Order, Step
from mm.data.owner import DataOwner, planned_steps
from mm.data.quarantine import LEDGER, BadSample, Quarantine
from mm.data.sampler import order_of, told_order
from mm.data.validation import ValidationPlan, ValidationReader, in_between
from mm.device.device import Device
from mm.device.facts import device_facts, sdpa_backend
from mm.ending import say_notes
from mm.errors import AgreedError, printable
from mm.model import flops
from mm.model.dropout import seed_of
from mm.model.fingerprint import vision_fingerprint
from mm.model.stage import Stage
from mm.parallel import mesh as parallel
from mm.parallel.activity import Work
from mm.parallel.agreement import all_of, on_first, together
from mm.parallel.mesh import Mesh
from mm.parallel.watchdog import Watchdog
from mm.training import checkpoint as state
from mm.training.claim import Claim
from mm.training.keeper import FeatureKeeper
from mm.training.metrics import MetricsWriter, ScoreMetrics, StepMetrics, ValidationMetrics
from mm.training.questions import QuestionSet
from mm.training.recorder import StepObserver
from mm.training.saves import BEST
from mm.training.sources import qkv_order
from mm.training.start import settle, start
from mm.training.step import step
from mm.training.update import StepResult, clips_in_adam
from mm.training.validation import validate
from mm.weights.groups import group_facts


@dataclass(frozen=True)
class _Opened:
    """What a rank that owns data reads from."""

    open_loader: Callable[[Iterable[Step]], StepLoader]
    data: TrainedOn
    make_order: Callable[[], Order]
    validation: ValidationReader | None
    quarantine: Quarantine | None
    validation_quarantine: Quarantine | None


class Trainer:
    """Everything that one rank holds during a run."""

    def __init__(
        self, run: Run, device: Device, mesh: Mesh, watchdog: Watchdog, claim: Claim | None = None
    ) -> None:
        """``claim`` is this rank's hold on the directories that the run writes."""
        self.device, self.mesh, self.watchdog, self._claim = device, mesh, watchdog, claim or Claim()
        self.reports = self.mesh.rank == self.mesh.world_size - 1
        """Whether this rank writes logs: the last one, as in Megatron."""
        self.validation: ValidationPlan | None = None
        """Known with the data; None without validation."""
        self.run, sources, self.schedule = settle(run, mesh, self._say)
        run, args = self.run, self.run.args
        stage = Stage(run.model, self.mesh, args.precision, device, args.loss_unit, run.num_pieces > 1)
        started = start(run, sources, self.schedule, stage, self.mesh, self._say)
        self.parts, self.progress, self.base = started.parts, started.progress, started.base
        self.checkpoint = started.checkpoint
        """The training checkpoint that holds the weights as they are now."""
        watchdog.follow(self.parts.stage.journal, self.parts.communicator)
        self.fingerprint = None if args.vision_feature_cache is None else vision_fingerprint(stage, mesh)
        self.metrics = None
        if self.reports:
            facts = {**resolved(run), "schedule": self.schedule.to_json(), "ran_on": self._ran_on(),
                     "optimizer_groups": group_facts(args, run.model)}
            self.metrics = MetricsWriter(args, facts, self.progress.iteration)

    def run_steps(self) -> None:
        """Train until ``--train-iters`` or ``--exit-interval``, saving and validating on the way and at the end."""
        args, first = self.run.args, self.progress.iteration
        last = args.train_iters
        if args.exit_interval is not None:
            last = min(last, (first // args.exit_interval + 1) * args.exit_interval)
        if first >= last:
            self._say(f"the checkpoint is at iteration {first} of {args.train_iters}: nothing to train")
            return
        observer = StepObserver(args, self.parts.stage, self.mesh, first + 1, last)
        for note in observer.notes:
            self._say(f"note: {note}")
        has_questions = any(asks(args, iteration) for iteration in range(first + 1, last + 1))
        questions = QuestionSet(self.run, self.parts) if has_questions else None
        data, keeper = self.data(last - first), self._keeper()
        started = time.perf_counter()
        for iteration in range(first + 1, last + 1):
            if self._has_stopped_early:
                break
            observer.begin(iteration)
            with self.watchdog.step(iteration):
                with self.parts.stage.journal.during(Work.DATA):
                    self.watchdog.plan = plan = next(data)
                result = self._step(plan, iteration)
                if keeper is not None:
                    keeper.keep(self.parts.stage.take_features())
            ended = time.perf_counter()  # the step has read its gradients' norm; Adam, still running, is the next one's
            self._report(plan, result, ended - started, observer.end())
            started = ended
            if written := observer.write(iteration):
                self._say("\n".join(written))
                started = time.perf_counter()
            if self.validation is not None and is_due(args, iteration):
                self._validate(self.validation, data)
                started = time.perf_counter()
            if questions is not None and asks(args, iteration):
                self._ask(questions)
                started = time.perf_counter()
            is_last = iteration == last or self._has_stopped_early
            if args.save and (is_last or iteration % (args.save_interval or last) == 0):
                with self.parts.stage.journal.during(Work.SAVE):
                    self._save(args.save)
                started = time.perf_counter()
        data.close()
        if keeper is not None:
            keeper.close()
        if self._has_stopped_early:
            best = self.progress.best
            self._say(f"stopped early after iteration {self.progress.iteration} of {args.train_iters}: the last "
                      f"{best.num_since} validations had no lower loss than iteration {best.iteration} "
                      f"(--early-stopping-patience {args.early_stopping_patience})")

    def close(self) -> None:
        """Close files and leave the process group, after success only: it waits for all ranks."""
        if self.metrics is not None:
            self.metrics.close()
        parallel.stop()

    def data(self, num_steps: int) -> DataOwner:
        """The next ``num_steps`` steps' data, read on the owning rank and shared within the replica.

        After each step that a validation follows, the validation's.
        """
        run, args, mesh, first = self.run, self.run.args, self.mesh, self.progress.iteration + 1
        due = [validates(args, run.data) and is_due(args, first + number) for number in range(num_steps)]

        def open_data() -> _Opened | None:
            if not mesh.owns_data:
                return None
            gauge = Gauge.from_config(run.data, run.model, args.seq_length)
            known, skips = replace(run.data, overwrite_cache=False), args.bad_sample == "skip"  # the preflight did that
            dataset = Dataset(known, skips, gauge, args.seed)
            quarantine = self._quarantine(dataset, dataset.skipped) if skips else None
            then, now, order = self.progress.data, dataset.contents(), told_order(run)
            consumed = self.progress.consumed_samples
            data = TrainedOn(now, order=order) if then is None else (
                then.followed_by(now, order, consumed, args.allow_new_data))
            own_run = replace(run, notes=())  # notes do not pickle
            make_order = partial(order_of, own_run, dataset.columns, mesh.dp_rank, consumed - data.began_at)
            reader = ValidationReader.open(run, gauge, mesh.dp_rank) if any(due) else None
            of_validation = None if reader is None or not skips else (
                self._quarantine(reader.dataset, reader.dataset.skipped if run.data.val_dataset else []))
            open_loader = partial(StepLoader, dataset, gauge.encoder, num_workers=args.num_workers, skips_bad=skips,
                                  prefetch_factor=run.data.prefetch_factor, features=self._feature_cache())
            return _Opened(open_loader, data, make_order, reader, quarantine, of_validation)

        opened = together(mesh, open_data)
        self.progress = replace(self.progress, data=opened and opened.data)
        reader = opened and opened.validation
        found = all_of((reader.plan(),) if reader else (), mesh.control_group)
        assert len(found) <= 1, "ranks that own data see the same samples"
        self.validation = found[0] if found else None
        if self.validation is not None:
            self._begin_validations(self.validation)
            num_steps += sum(due) * self.validation.num_plans
        loader = self._loader(opened)
        steps = loader and (in_between(loader, due, reader.loader) if reader else loader)
        stage = self.parts.stage
        return DataOwner(steps, mesh, num_steps, stage.has_patch_embedding, run.model, self.device,
                         opened and opened.quarantine, stage.has_projector, opened and opened.validation_quarantine)

    def _loader(self, opened: _Opened | None) -> StepLoader | None:
        """Of the training's samples; every rank must call it.  Without workers the calling thread plans, too."""
        planned = planned_steps(self.mesh, opened and opened.make_order) if self.run.args.num_workers else None
        return together(self.mesh, lambda: opened and opened.open_loader(planned or opened.make_order().steps()))

    def _feature_cache(self) -> FeatureCache | None:
        """What the reader of the data finds of the ViT's work."""
        if self.run.args.vision_feature_cache is None:
            return None
        assert self.fingerprint is not None, "it is made with the stage"
        row_bytes = self.run.model.vision.hidden_size * self.parts.stage.config.params_dtype.itemsize
        return FeatureCache(self.run.args.vision_feature_cache, self.fingerprint, row_bytes)

    def _keeper(self) -> FeatureKeeper | None:
        """On the ranks that have what the ViT makes, one for each picture."""
        args, mesh = self.run.args, self.mesh
        if args.vision_feature_cache is None or not self.parts.stage.gives_features:
            return None
        gib = args.vision_feature_cache_gib
        max_bytes = None if gib is None else int(gib * 2**30)
        return FeatureKeeper(args.vision_feature_cache, mesh.rank, max_bytes, mesh.dp_size * mesh.cp_size)

    def _quarantine(self, dataset: Dataset, skipped: Sequence[BadSample]) -> Quarantine:
        """With what the check of the records has found already."""
        args, ledger = self.run.args, None
        if self.mesh.rank == 0:
            ledger = Path(args.log_dir) / LEDGER
            if skipped:
                say_notes([f"{len(skipped)} samples are left out; {ledger} lists them"])
        quarantine = Quarantine(len(dataset) + len(skipped), args.max_bad_fraction, ledger)
        quarantine.add(skipped)
        return quarantine

    # Validation

    def _begin_validations(self, plan: ValidationPlan) -> None:
        known = self.progress.best.of(plan.fingerprint)
        if self.progress.best.loss is not None and known.loss is None:
            self._say("note: the samples for validation are others than before: the least loss so far begins anew")
        self.progress = replace(self.progress, best=known)
        if plan.num_samples < plan.num_of_all:
            self._say(f"note: a validation takes {plan.num_samples} of {plan.num_of_all} samples, the same each time "
                      f"(--eval-iters {self.run.args.eval_iters})")

    def _validate(self, plan: ValidationPlan, data: Iterator[StepPlan]) -> None:
        started, iteration = time.perf_counter(), self.progress.iteration
        found = validate(self.parts, data, plan.num_plans, self.watchdog, iteration)
        best = self.progress.best.after(found.loss, iteration)
        self.progress = replace(self.progress, best=best)
        if found.loss is None:
            self._say(f"note: the validation after iteration {iteration} has no loss: " + (
                "it is not finite" if found.num_target_tokens else "no sample can be used"))
        if self.metrics is not None:
            self.metrics.write_validation(ValidationMetrics(
                iteration=iteration,
                consumed_samples=self.progress.consumed_samples,
                validation_loss=found.loss,
                num_samples=found.num_samples,
                num_target_tokens=found.num_target_tokens,
                validation_seconds=time.perf_counter() - started,
                best_validation_loss=best.loss,
                best_iteration=best.iteration,
            ))
        if self.run.args.save_best and best.iteration == iteration:
            assert self.run.args.save is not None, "checked with the settings"
            with self.parts.stage.journal.during(Work.SAVE):
                self._save(str(Path(self.run.args.save) / BEST), keep_last=1)

    def _ask(self, questions: QuestionSet) -> None:
        started, iteration = time.perf_counter(), self.progress.iteration
        scores = questions.ask(iteration)
        if self.metrics is not None:
            self.metrics.write_score(ScoreMetrics(
                iteration=iteration,
                consumed_samples=self.progress.consumed_samples,
                validation_score_percent=scores["headline"]["score_percent"],
                num_questions=scores["headline"]["num_questions"],
                num_cut_answers=scores["num_cut_answers"],
                answer_seconds=time.perf_counter() - started,
            ), scores["benchmark"])

    @property
    def _has_stopped_early(self) -> bool:
        """The same on every rank, because the losses are."""
        patience = self.run.args.early_stopping_patience
        return self.validation is not None and patience is not None and self.progress.best.num_since >= patience

    def _step(self, plan: StepPlan, iteration: int) -> StepResult:
        self.checkpoint = None
        if self.run.model.lora.dropout:
            plan = replace(plan, dropout_seed=seed_of(self.run.args.seed, iteration))
        try:
            result = step(self.parts, plan, self.schedule.at(self.progress.consumed_samples))
        except AgreedError as error:
            raise AgreedError(f"iteration {iteration}: {problem}" for problem in error.problems) from error
        consumed = self.progress.consumed_samples + self.run.global_batch_size
        self.progress = replace(self.progress, iteration=iteration, consumed_samples=consumed)
        return result

    def _report(self, plan: StepPlan, result: StepResult, seconds: float, timers: Mapping[str, float] | None) -> None:
        if plan.totals.num_target_tokens == 0:
            self._say(f"note: iteration {self.progress.iteration} has no token to learn: its loss is 0. Look at "
                      f"the roles of the samples, and whether --seq-length {self.run.args.seq_length} cuts answers off")
        if plan.totals.num_cut_images:
            self._say(f"note: iteration {self.progress.iteration}: {plan.totals.num_cut_images} pictures are left out, "
                      f"because --seq-length {self.run.args.seq_length} would have cut them")
        if self.metrics is None:
            return
        totals, num_devices, peak = plan.totals, self.mesh.world_size, self.device.peak_flops
        rate = flops.training_flops(self.run.model, totals) / seconds / num_devices
        self.metrics.write(StepMetrics(
            iteration=self.progress.iteration,
            consumed_samples=self.progress.consumed_samples,
            step_seconds=seconds,
            global_batch_size=self.run.global_batch_size,
            num_tokens=totals.num_tokens,
            num_target_tokens=totals.num_target_tokens,
            num_patches=totals.num_patches,
            num_images=totals.num_images,
            num_cut_images=totals.num_cut_images,
            tokens_per_second_per_device=totals.num_tokens / seconds / num_devices,
            model_flops_per_second_per_device=rate,
            mfu=rate / peak if peak else None,
            max_memory_bytes=self.device.max_memory_bytes(),
            timers=timers,
            num_cached_images=totals.num_cached_images if self.run.args.vision_feature_cache else None,
            **asdict(result),
        ))

    def _ran_on(self) -> dict[str, Any]:
        """Device, versions and kernels of this rank, for the run's file."""
        vision, language, tp_size = self.run.model.vision, self.run.model.language, self.run.tp_size
        towers = {"vision": (vision.num_attention_heads, vision.num_attention_heads, vision.head_dim, False),
                  "language": (language.num_attention_heads, language.num_query_groups, language.kv_channels, True)}
        dtype = self.parts.stage.config.params_dtype
        sdpa = {name: sdpa_backend(self.device, dtype, heads // tp_size, kv_heads // tp_size, head_dim, causal)
                for name, (heads, kv_heads, head_dim, causal) in towers.items()}
        adam = next((one.optimizer for one in self.parts.optimizer.chained_optimizers), None)
        return {**device_facts(self.device, adam), "sdpa": sdpa,
                "clips_in_adam": clips_in_adam(self.parts.optimizer, self.device)}

    def _say(self, text: str) -> None:
        if self.reports:
            print(printable(text), flush=True)

    # Weights and training state in and out

    def _save(self, directory: str, *, weights_only: bool = False, keep_last: int | None = None) -> Path:
        args = self.run.args
        together(self.mesh, self._claim.check)
        self.checkpoint = state.save(
            directory,
            self.progress,
            self.parts,
            resolved(self.run),
            save_optim=not (args.no_save_optim or weights_only),
            save_rng=not (args.no_save_rng or weights_only),
            keep_last=keep_last or (None if weights_only else args.keep_last_checkpoints),
            base=self.base,
        )
        self._say(f"saved {self.checkpoint}")
        return self.checkpoint

    def export(self) -> None:
        """Write the model in Hugging Face format when the run has come to its end and that is asked for; of adapters
        a PEFT directory, the model with them added, or both."""
        args = self.run.args
        targets = {flag: path for flag, path in (("--export-hf", args.export_hf),
                                                 ("--export-merged-hf", args.export_merged_hf)) if path is not None}
        if not targets:
            return
        if self.progress.iteration < args.train_iters and not self._has_stopped_early:
            for flag, path in targets.items():
                self._say(f"note: nothing was exported to {path}: the run stands at iteration "
                          f"{self.progress.iteration} of {args.train_iters}; resume it with the same {flag}")
            return
        passing = f"{next(iter(targets.values()))}.checkpoint"
        is_saved = self.checkpoint is not None

        def write(source: Path) -> None:
            for flag, path in targets.items():
                self._export(source, path, flag == "--export-merged-hf")

        try:
            source = self.checkpoint or self._save(passing, weights_only=True)
            self._say(f"exporting {source} to {' and '.join(targets.values())}")
            on_first(self.mesh, lambda: write(source))
        finally:
            if not is_saved and self.mesh.rank == 0 and Path(passing).is_dir():
                remove(passing)

    def _export(self, source: Path, target: str, is_merged: bool) -> None:
        run = self.run
        hf_dir = run.data.model_name_or_path
        if not run.model.lora.is_on:
            convert.mm_to_hf(source, hf_dir, target).run(convert.Options())
            return
        adapters = open_saved(source)
        if not is_merged:
            export_peft(adapters, target, hf_dir).run(convert.Options())
            return
        assert self.base is not None, "checked before the run: there is a base model to merge with"
        base = open_base(self.base["path"], run.model, qkv_order(run))
        merge(adapters, base, hf_dir, target).run(convert.Options())
