"""Where a run starts: from random weights, from a directory of any kind, or from adapters and their base model.

Rank 0 has decided, in the check before the run; the others follow.  Every rank calls these functions together, and a
mistake on one raises the same UserError on all.
"""

import os
import secrets
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from mm.checkpoint.manifest import MANIFEST_FILE
from mm.checkpoint.merge_lora import check_base
from mm.checkpoint.source import Kind
from mm.config.run import Run, with_own_paths
from mm.console import ongoing
from mm.errors import naming, refuse
from mm.files import wait_until_visible
from mm.model import load
from mm.model.stage import Stage
from mm.parallel.agreement import all_of, on_first, together
from mm.parallel.megatron import DTYPES
from mm.parallel.mesh import Mesh
from mm.run.checkpoint import restore as state
from mm.run.checkpoint.disks import Disks
from mm.run.progress import Say, TrainingProgress
from mm.run.schedule import Schedule, consumed_by
from mm.run.sources import Checked, Sources, continued, open_start, save_problems, tidy_up
from mm.run.step import Setup
from mm.weights.trained import saved_among

_LATE_SECONDS = 90.0
"""How long a rank waits for the checkpoint that rank 0 sees.  NFS remembers directories for up to 60 s (acdirmax)."""
_NAMES = {Kind.HUGGING_FACE: "Hugging Face", Kind.MINDSPEED: "converted", Kind.TRAINING: "training",
          Kind.ADAPTER: "PEFT"}  # fmt: skip


def decided_by_first_rank(run: Run, checked: Checked | None, mesh: Mesh) -> tuple[Run, Schedule, Path | None]:
    """Rank 0's run with the paths of this machine, its schedule, and the training checkpoint that it continues from.

    ``checked``: what rank 0 has checked; None on the others.
    """

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
    notes = on_first(mesh, lambda: [  # of the directory, in which the other ranks have opened one checkpoint
        note for source in (whole, sources.adapters) if source is not None for note in source.notes])
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
