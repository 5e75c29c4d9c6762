"""Where a run starts: from random weights, from a directory of any kind, or from adapters and their base model."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm.config.run import Run
from mm.conversion.adapters import check_base
from mm.errors import AgreedError, refuse
from mm.files import wait_until_visible
from mm.formats.manifest import MANIFEST_FILE
from mm.formats.source import Kind
from mm.model import load
from mm.model.stage import Stage
from mm.parallel.agreement import all_of, on_first, together
from mm.parallel.megatron import DTYPES
from mm.parallel.mesh import Mesh
from mm.progress import ongoing
from mm.training import checkpoint as state
from mm.training.disks import Disks
from mm.training.opened import Opened, Questions, Samples
from mm.training.saves import continued, new_run_id, save_problems, tidy_up
from mm.training.schedule import Schedule, scheduled
from mm.training.sources import Sources, checkpoint_of, consumed_by, open_start
from mm.training.step import Setup
from mm.weights.trained import saved_among

_LATE_SECONDS = 90.0
"""How long a rank waits for the checkpoint that rank 0 sees.  NFS remembers directories for up to 60 s (acdirmax)."""
_NAMES = {Kind.HUGGING_FACE: "Hugging Face", Kind.MINDSPEED: "converted", Kind.TRAINING: "training",
          Kind.ADAPTER: "PEFT"}  # fmt: skip


@dataclass(frozen=True)
class Start:
    """A rank's setup, whose weights are those that training starts from."""

    setup: Setup
    progress: state.TrainingProgress
    checkpoint: Path | None = None
    """The training checkpoint that holds them in the run's dtype."""
    base: Mapping[str, Any] | None = None
    """Path and checksum of the base model of adapters; None if it is random or there are no adapters."""


@dataclass(frozen=True)
class Settled:
    """A run about to start, with the same number of steps and learning rates on all ranks."""

    run: Run
    schedule: Schedule
    sources: Sources
    """The weights that it starts from, opened by every rank."""
    samples: Samples | None
    """Opened by the check before the run, like ``questions``; None on ranks that did not check."""
    questions: Questions | None
    disks: Disks
    """Those of ``--save``."""


def settle(
    run: Run, mesh: Mesh, say: Callable[[str], None], opened: Opened | None = None, disks: Disks | None = None
) -> Settled:
    """Settle the number of steps and the learning-rate schedule, and open what the run starts from.

    ``say`` reports to the user.  ``opened`` is what the check before the run has opened on this rank.  Rank 0 chooses
    the checkpoint in ``--load``, because on a slow shared disk other ranks may not see yet which one is the newest.
    ``disks``: those of ``--save``; if there are several, rank 0's decides whether the run continues.  Every rank calls
    it together; a mistake on one raises the same UserError on all.
    """
    disks, opened = disks or Disks.one(mesh), opened or Opened()
    run = _with_agreed_steps(on_first(mesh, lambda: run) if disks.are_several else run, mesh)
    for note in all_of(together(mesh, lambda: tuple(tidy_up(run) if disks.is_first else ())), mesh.control_group):
        say(f"note: {note}")

    def find() -> tuple[Settled, tuple[str, ...]]:
        if checkpoint is not None:
            wait_until_visible(checkpoint.path / MANIFEST_FILE, _LATE_SECONDS)  # if it stays unseen, opening it fails
        # Another run may have saved in ``--load`` since the check.
        sources = opened.sources and opened.sources.at(checkpoint)
        sources = sources or open_start(run, checkpoint).at(checkpoint)
        assert sources is not None, "they were opened from this checkpoint"
        if disks.is_first and mesh.rank:  # rank 0's has been checked
            refuse(f"{disks.hosts[mesh.rank]}: {problem}" for problem in save_problems(run, sources))
        with_schedule, schedule, notes = scheduled(run, sources)
        return Settled(with_schedule, schedule, sources, opened.samples, opened.questions, disks), notes

    seen = all_of((run.args.load,), mesh.control_group)
    if len(seen) > 1:
        one, other = (path or "random weights" for path in seen[:2])
        late = "" if run.args.save is None else (
            f"; if they are the same, some machines did not see the checkpoint in --save {run.args.save} yet, so start "
            f"again")
        raise AgreedError(
            f"some ranks start from {one} and others from {other}: give every machine the same --load, "
            f"--pretrained-checkpoint, --load-base-model and model_name_or_path{late}")
    checkpoint = on_first(mesh, lambda: checkpoint_of(run))
    if disks.are_several and checkpoint is not None:
        disks.check_same(checkpoint.path, mesh)
    settled, notes = together(mesh, find)
    for note in notes:
        say(f"note: {note}")
    return settled


def _with_agreed_steps(run: Run, mesh: Mesh) -> Run:
    """``run`` with the number of steps that its epochs take, which only rank 0 has counted."""
    if run.args.num_train_epochs is None:
        return run
    (num_steps,) = all_of((run.args.train_iters,) if mesh.rank == 0 else (), mesh.control_group)
    assert num_steps, "the check before the run counts them, or refuses the run"
    return replace(run, args=replace(run.args, train_iters=num_steps))


def start(settled: Settled, stage: Stage, mesh: Mesh, say: Callable[[str], None]) -> Start:
    """Fill ``stage``, build optimizer and communication around it, and restore a training checkpoint.

    Every rank calls it together; a mistake on one raises the same UserError on all.
    """
    run, sources, args = settled.run, settled.sources, settled.run.args
    stage.device.seed(args.seed + mesh.rank)
    adapters = [weight for weight in stage.weights if weight.is_adapter]
    own = [weight for weight in stage.weights if not weight.is_adapter]
    base, whole = None, sources.model
    # The whole model of a training checkpoint comes with its optimizer, in _progress.
    fills_whole = whole is not None and (whole.kind is not Kind.TRAINING or run.model.lora.is_on)
    if whole is None:
        load.initialize(stage, own, mesh, args.seed, run.model.language.init_method_std)
    elif fills_whole:
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
    started = _progress(run, setup, sources)
    loaded = sources.adapters or whole
    for note in whole.notes if whole is not None and fills_whole else ():
        say(f"note: {note}")
    if loaded is not None:
        beside = f" beside {whole.path}" if sources.adapters is not None and whole is not None else ""
        say(f"loaded a {_NAMES[loaded.kind]} checkpoint from {args.load or loaded.path}{beside}, iteration "
            f"{started.progress.iteration}")
    for note in started.progress.notes:
        say(f"note: {note}")
    trained = sources.trained(run)
    if trained is not None and trained.manifest and started.progress.data is None and not args.finetune:
        say("note: the checkpoint, which an older version saved, does not say what data it was trained on; training "
            "continues as if they were the same")
    goes_on = continued(run, sources) is not None
    run_id = on_first(mesh, lambda: started.progress.run_id if goes_on else new_run_id())
    given_start = started.progress.given_start if goes_on else run.given_start
    return replace(started, base=base, progress=replace(
        started.progress, run_id=run_id, schedule=settled.schedule, given_start=given_start))


def _progress(run: Run, setup: Setup, sources: Sources) -> Start:
    """Continue from ``--load`` if it holds trained weights: with optimizer and random states, if the flags allow it."""
    args, resumed = run.args, sources.trained(run)
    if args.load is None or resumed is None:
        return Start(setup, state.TrainingProgress(0, 0))
    if resumed.kind is Kind.TRAINING:
        progress = state.load(resumed, setup, load_optim=not args.no_load_optim, load_rng=not args.no_load_rng,
                              finetune=args.finetune)
        is_same = {view.stored.dtype for view in resumed.views} == {DTYPES[args.precision]}
        return Start(setup, progress, resumed.path if is_same else None)
    if resumed.iteration is None or args.finetune:
        return Start(setup, state.TrainingProgress(0, 0))
    return Start(setup, state.TrainingProgress(
        resumed.iteration, consumed_by(resumed, run),
        notes=("MindSpeed-MM trained it: optimizer state and random states start fresh",),
    ))
