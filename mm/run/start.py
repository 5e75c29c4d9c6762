"""What a run starts from, which all ranks open together: weights, optimizer and progress, then the data.

The weights are random, of a directory of any kind, or adapters with their base model.  Rank 0 has decided, in the check
before the run; the others follow.  Every rank calls these functions together, and a mistake on one raises the same
UserError on all.
"""

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mm.checkpoint.adapters import check_base
from mm.checkpoint.directories import find_checkpoint
from mm.checkpoint.manifest import MANIFEST_FILE
from mm.checkpoint.source import Kind
from mm.config.rules import is_due, validates
from mm.config.run import Run, with_own_paths
from mm.console import ongoing
from mm.data.index.dataset import Dataset, TrainedOn
from mm.data.loader.broadcast import StepBroadcast
from mm.data.loader.feature_cache import FeatureCache
from mm.data.loader.loader import StepLoader, ValidationPlan, ValidationReader, in_between, planned_steps
from mm.data.loader.quarantine import LEDGER, Quarantine
from mm.data.sample import BadSample
from mm.data.sampler.sampler import SampleOrder, StepSamples, order_description, order_of
from mm.errors import counted, naming, refuse
from mm.files import wait_until_visible
from mm.model import load
from mm.model.stage import Stage
from mm.parallel.agreement import all_of, on_first, together
from mm.parallel.megatron import DTYPES
from mm.parallel.mesh import Mesh
from mm.process import print_notes
from mm.run.checkpoint import restore as state
from mm.run.checkpoint.disks import Disks
from mm.run.progress import Say, TrainingProgress
from mm.run.schedule import Schedule, consumed_by
from mm.run.sources import Checked, Samples, Sources, continued, open_start, save_problems, tidy_up
from mm.run.step import Setup
from mm.weights.trained import saved_among

_LATE_SECONDS = 90.0
"""How long a rank waits for the checkpoint that rank 0 sees.  NFS remembers directories for up to 60 s (acdirmax)."""
_NAMES = {Kind.HUGGING_FACE: "Hugging Face", Kind.MINDSPEED: "converted", Kind.TRAINING: "training",
          Kind.ADAPTER: "PEFT"}  # fmt: skip


def decided_by_first_rank(run: Run, checked: Checked | None, mesh: Mesh) -> tuple[Run, Schedule, Path | None]:
    """Rank 0's run with the paths of this machine, its schedule, and the training checkpoint that it continues from.
    ``checked``: what rank 0 has checked; None on the others."""

    def decided() -> tuple[Run, Schedule, Path | None]:
        assert checked is not None and checked.schedule is not None and checked.sources is not None, "no problems"
        return checked.run, checked.schedule, checked.sources.checkpoint(checked.run)

    found, schedule, checkpoint = on_first(mesh, decided)
    return with_own_paths(found, run), schedule, checkpoint


def open_sources(
    run: Run, checked: Checked | None, checkpoint: Path | None, mesh: Mesh, disks: Disks, say: Say
) -> Sources:
    """Delete leftovers of killed saves, and open the weights that the run starts from."""
    for note in all_of(together(mesh, lambda: tuple(tidy_up(run) if disks.is_first else ())), mesh.control_group):
        say(f"note: {note}")

    if disks.are_several and checkpoint is not None:
        disks.check_same(checkpoint, mesh)

    def find() -> Sources:
        if checked is not None and checked.sources is not None:
            return checked.sources
        if checkpoint is not None:
            wait_until_visible(checkpoint / MANIFEST_FILE, _LATE_SECONDS)  # if it stays unseen, opening it fails
        with naming(disks.hosts[mesh.rank]) if disks.are_several else nullcontext():
            sources = open_start(run, checkpoint)
            if disks.are_several and disks.is_first:  # the check has looked at rank 0's disk alone
                refuse(save_problems(run, sources))
            return sources

    return together(mesh, find)


def start(
    run: Run, schedule: Schedule, sources: Sources, stage: Stage, mesh: Mesh, say: Say
) -> tuple[Setup, TrainingProgress]:
    """Fill ``stage``, build optimizer and communication around it, and restore a training checkpoint."""
    args, whole, base = run.args, sources.model, None
    stage.device.seed(args.seed + mesh.rank)
    adapters = [weight for weight in stage.weights if weight.is_adapter]
    own = [weight for weight in stage.weights if not weight.is_adapter]
    if whole is None:
        load.initialize(stage, own, mesh, args.seed, run.model.language.init_method_std)
    elif whole.kind is not Kind.TRAINING or run.model.lora.is_on:  # else it comes with its optimizer, in _restored
        load.fill(stage, own, whole, mesh)
    if run.model.lora.is_on and whole is not None:
        crc32 = on_first(mesh, lambda: check_base(sources.adapters, whole, "--load-base-model"))
        base = {"path": os.path.abspath(whole.path), "crc32": crc32}
    if sources.adapters is None:
        load.initialize(stage, adapters, mesh, args.seed, run.model.language.init_method_std)
    elif sources.adapters.kind is not Kind.TRAINING:
        load.fill(stage, saved_among(stage.weights, run.model), sources.adapters, mesh)
    with ongoing("building the optimizer", mesh.rank == 0):
        setup = together(mesh, lambda: Setup.build(stage, mesh, args))
    progress = _restored(run, setup, sources)
    is_checkpoint = sources.checkpoint(run) is not None  # whose notes were taken before leftovers were deleted
    notes = on_first(mesh, lambda: find_checkpoint(str(args.load))[1] if is_checkpoint else ())
    if whole is not None and (whole.kind is not Kind.TRAINING or run.model.lora.is_on):
        notes = (*whole.notes, *notes)
    if (loaded := sources.adapters or whole) is not None:
        beside = f" beside {whole.path}" if sources.adapters is not None and whole is not None else ""
        say(f"loaded a {_NAMES[loaded.kind]} checkpoint from {args.load or loaded.path}{beside}, iteration "
            f"{progress.iteration}")
    for note in (*notes, *progress.notes):
        say(f"note: {note}")
    goes_on = continued(run, sources) is not None
    run_id = on_first(mesh, lambda: progress.run_id if goes_on else secrets.token_hex(8))
    given_start = progress.given_start if goes_on else run.given_start
    return setup, replace(progress, run_id=run_id, schedule=schedule, given_start=given_start, base=base)


def _restored(run: Run, setup: Setup, sources: Sources) -> TrainingProgress:
    """Continue from ``--load`` if it holds trained weights: with optimizer and random states, if the flags allow it."""
    args, resumed = run.args, sources.trained(run)
    if resumed is not None and resumed.kind is Kind.TRAINING:
        return state.load(resumed, setup, load_optim=not args.no_load_optim, load_rng=not args.no_load_rng,
                          finetune=args.finetune)
    if resumed is None or resumed.iteration is None or args.finetune:
        return TrainingProgress(0, 0)
    return TrainingProgress(
        resumed.iteration, consumed_by(resumed, run),
        notes=("MindSpeed-MM trained it: optimizer state and random states start fresh",))


def exportable(run: Run, sources: Sources) -> Path | None:
    """The training checkpoint that the run continues from, if it holds the weights in the run's dtype."""
    trained = sources.trained(run)
    is_same = trained is not None and {view.stored.dtype for view in trained.views} == {DTYPES[run.args.precision]}
    return sources.checkpoint(run) if is_same else None


# The data of the steps and validations


@dataclass(frozen=True)
class Feed:
    """The data of a run's steps."""

    plans: StepBroadcast
    """A plan for each step; after a step with a validation, the validation's plans follow."""
    trained_on: TrainedOn | None
    """None on ranks that read no data."""
    validation: ValidationPlan | None
    """None without validation."""
    num_samples: int
    """Training samples in one epoch."""
    began_at: int
    """Samples that the run had consumed when it began with this data."""

    def epoch(self, consumed_samples: int) -> float:
        """Number of epochs over this data."""
        return (consumed_samples - self.began_at) / self.num_samples


@dataclass(frozen=True)
class _OwnerData:
    """What a rank that owns data has opened."""

    open_loader: Callable[[Iterable[StepSamples]], StepLoader]
    data: TrainedOn
    num_samples: int
    make_order: Callable[[], SampleOrder]
    validation: ValidationReader | None
    quarantine: Quarantine | None
    validation_quarantine: Quarantine | None


def open_feed(
    run: Run, mesh: Mesh, stage: Stage, progress: TrainingProgress, num_steps: int, fingerprint: str | None,
    samples: Samples | None = None,
) -> Feed:  # fmt: skip
    """The next ``num_steps`` steps' plans, read on the owning rank and shared within the replica.

    ``fingerprint``: that of the ViT, with ``--vision-feature-cache``.  ``samples``: the run's samples, if this rank has
    already opened them.  Raises the same AgreedError on every rank for data that cannot be read, or that differ from
    the checkpoint's.
    """
    due = [validates(run.args, run.data) and is_due(run.args, progress.iteration + 1 + number)
           for number in range(num_steps)]

    def open_own() -> _OwnerData | None:
        if not mesh.owns_data:
            return None
        return _open(run, mesh, stage, progress, samples or Samples.open(run, any(due)), any(due), fingerprint)

    opened = together(mesh, open_own)
    reader = opened and opened.validation
    own_plan = together(mesh, lambda: reader.plan() if reader else None)
    found = all_of((own_plan,) if own_plan else (), mesh.control_group)
    assert len(found) <= 1, "ranks that own data see the same samples"
    validation = found[0] if found else None
    loader = together(mesh, lambda: opened and opened.open_loader(
        planned_steps(opened.make_order, run.args.num_workers)))
    steps = loader and (in_between(loader, due, reader.loader) if reader else loader)
    num_plans = num_steps + (sum(due) * validation.num_plans if validation else 0)
    plans = StepBroadcast(steps, mesh, num_plans, stage.has_patch_embedding, run.model, stage.device,
                          opened and opened.quarantine, stage.has_projector, opened and opened.validation_quarantine,
                          run.args.shards_gradients)
    numbers, *_ = all_of(((opened.num_samples, opened.data.began_at),) if opened else (), mesh.control_group)
    return Feed(plans, opened and opened.data, validation, *numbers)


def _open(
    run: Run, mesh: Mesh, stage: Stage, progress: TrainingProgress, samples: Samples, validates_now: bool,
    fingerprint: str | None,
) -> _OwnerData:  # fmt: skip
    """What a rank that owns data reads its steps from."""
    args, measure, dataset = run.args, samples.measure, samples.splits["training"]
    skips = args.bad_sample == "skip"
    quarantine = _quarantine(run, mesh, dataset, dataset.skipped) if skips else None
    then, now, order = progress.data, dataset.fingerprints(), order_description(run)
    consumed = progress.consumed_samples
    data = TrainedOn(now, order=order) if then is None else then.followed_by(now, order, consumed, args.allow_new_data)
    own_run = replace(run, notes=())  # notes do not pickle
    make_order = partial(order_of, own_run, dataset.columns, mesh.dp_rank, consumed - data.began_at)
    reader = ValidationReader(run, samples.splits["validation"], measure, mesh.dp_rank) if validates_now else None
    validation_quarantine = None if reader is None or not skips else (
        _quarantine(run, mesh, reader.dataset, reader.dataset.skipped if run.data.val_dataset else []))
    open_loader = partial(StepLoader, dataset, measure.encoder, num_workers=args.num_workers, skips_bad=skips,
                          prefetch_factor=run.data.prefetch_factor, features=_feature_cache(run, stage, fingerprint))
    return _OwnerData(open_loader, data, len(dataset), make_order, reader, quarantine, validation_quarantine)


def _feature_cache(run: Run, stage: Stage, fingerprint: str | None) -> FeatureCache | None:
    """The cache of ViT features, shared by steps and runs; None without ``--vision-feature-cache``."""
    if run.args.vision_feature_cache is None:
        return None
    assert fingerprint is not None, "it is computed with the stage"
    row_bytes = run.model.vision.hidden_size * stage.config.params_dtype.itemsize
    return FeatureCache(run.args.vision_feature_cache, fingerprint, row_bytes)


def _quarantine(run: Run, mesh: Mesh, dataset: Dataset, skipped: Sequence[BadSample]) -> Quarantine:
    """A quarantine that begins with ``skipped``, found by the check of the records."""
    ledger = None
    if mesh.rank == 0:
        ledger = Path(run.args.log_dir) / LEDGER
        if skipped:
            print_notes([f"{counted(len(skipped), 'sample')} left out; {ledger} lists them"])
    quarantine = Quarantine(len(dataset) + len(skipped), run.args.max_bad_fraction, ledger)
    quarantine.add(skipped)
    return quarantine
