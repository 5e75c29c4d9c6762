"""Which run owns the checkpoints in ``--save``: a run replaces or deletes another run's only if the user allows it.

Every checkpoint has the id of the run that saved it.  A run that continues from a checkpoint in ``--save`` keeps its
id; one that starts fresh, or continues from another directory, gets a new one.  Needs neither megatron nor a device.
"""

import secrets
from collections.abc import Iterator
from pathlib import Path

from mm.config.run import Run
from mm.formats.checkpoints import run_id_of, run_ids
from mm.formats.source import Kind
from mm.formats.training_writer import tidy
from mm.training.sources import Sources

BEST = "best"
"""Subdirectory of ``--save`` for the checkpoint with the lowest validation loss."""


def new_run_id() -> str:
    """A unique random id."""
    return secrets.token_hex(8)


def continued(run: Run, sources: Sources) -> Path | None:
    """The checkpoint in ``--save``, or its subdirectory ``best``, that this run continues; None for a new run."""
    args, trained = run.args, sources.trained(run)
    if args.save is None or args.finetune or trained is None or trained.kind is not Kind.TRAINING:
        return None
    return trained.path if trained.path.resolve().is_relative_to(Path(args.save).resolve()) else None


def save_problems(run: Run, sources: Sources) -> Iterator[str]:
    """Problems with checkpoints of other runs in the directories where this run saves."""
    args, folder = run.args, continued(run, sources)
    if args.save is None or args.allow_used_save:
        return
    own = () if folder is None else (run_id_of(folder),)
    for directory in save_directories(run)[: 2 if args.save_best else 1]:
        others = [iteration for iteration, run_id in run_ids(directory).items() if run_id not in own]
        if not others:
            continue
        shown = f"{', '.join(map(str, others[:5]))}{', ...' if len(others) > 5 else ''}"
        found = f"--save is {args.save!r}, but {directory} holds checkpoints of another run (iterations: {shown})"
        if folder is not None:
            found += f", not of the run that continues from {folder}: move them away"
        elif args.finetune:
            found += (", and --finetune starts a new run: leave it out and give --load "
                      f"{directory} to continue that run, or give another --save")
        else:
            found += f": give --load {directory} to continue that run, or another --save for a new one"
        yield (f"{found}; or add --allow-used-save to save beside them, which replaces those of the same iterations")


def tidy_up(run: Run) -> list[str]:
    """Delete leftovers of killed saves where this run saves; return notes.  The run must hold the lock."""
    return [note for directory in save_directories(run) for note in tidy(directory)]


def save_directories(run: Run) -> tuple[Path, ...]:
    """Where the run saves: ``--save`` and its subdirectory for the best checkpoint; empty without ``--save``."""
    save = run.args.save
    return () if save is None else (Path(save), Path(save) / BEST)
