"""Opens, on all ranks together, the plans of a run's steps and of the validations between them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mm.config.flag_rules import is_due, validates
from mm.config.run import Run
from mm.data.index.dataset import Dataset, TrainedOn
from mm.data.loader.broadcast import StepBroadcast
from mm.data.loader.feature_cache import FeatureCache
from mm.data.loader.loader import StepLoader, ValidationPlan, ValidationReader, in_between, planned_steps
from mm.data.loader.quarantine import LEDGER, Quarantine
from mm.data.sample import BadSample
from mm.data.sampler.sampler import SampleOrder, StepSamples, order_description, order_of
from mm.errors import counted
from mm.model.stage import Stage
from mm.parallel.agreement import all_of, together
from mm.parallel.mesh import Mesh
from mm.process import print_notes
from mm.run.progress import TrainingProgress
from mm.run.sources import Samples


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
    found = all_of((reader.plan(),) if reader else (), mesh.control_group)
    assert len(found) <= 1, "ranks that own data see the same samples"
    validation = found[0] if found else None
    loader = together(mesh, lambda: opened and opened.open_loader(
        planned_steps(opened.make_order, run.args.num_workers)))
    steps = loader and (in_between(loader, due, reader.loader) if reader else loader)
    num_plans = num_steps + (sum(due) * validation.num_plans if validation else 0)
    plans = StepBroadcast(steps, mesh, num_plans, stage.has_patch_embedding, run.model, stage.device,
                      opened and opened.quarantine, stage.has_projector, opened and opened.validation_quarantine,
                      run.args.shards_gradients)
    counted = all_of(((opened.num_samples, opened.data.began_at),) if opened else (), mesh.control_group)
    return Feed(plans, opened and opened.data, validation, *counted[0])


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
