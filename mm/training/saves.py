"""Whose checkpoints ``--save`` holds: a run replaces and deletes its own, and others' only where the user says so.

Every checkpoint has the id of the run that saved it.  A run that goes on from a checkpoint in ``--save`` is the same
run; one that begins, or goes on from another directory, is a new one.  Neither megatron nor a device is needed.
"""

import secrets
from collections.abc import Iterator
from pathlib import Path

from mm.config.run import Run
from mm.formats.source import Kind
from mm.formats.training import run_id_of, run_ids, tidy
from mm.training.sources import Sources

BEST = "best"
"""Below ``--save``: the checkpoint of the least validation loss."""


def new_run_id() -> str:
    """Never the same twice."""
    return secrets.token_hex(8)


def continued(run: Run, sources: Sources) -> Path | None:
    """The checkpoint in ``--save``, or in ``best`` below it, that the same run goes on from; None for a new run."""
    args, trained = run.args, sources.trained(run)
    if args.save is None or args.finetune or trained is None or trained.kind is not Kind.TRAINING:
        return None
    return trained.path if trained.path.resolve().is_relative_to(Path(args.save).resolve()) else None


def save_problems(run: Run, sources: Sources) -> Iterator[str]:
    """Checkpoints of other runs where this one is going to save."""
    args, folder = run.args, continued(run, sources)
    if args.save is None or args.allow_used_save:
        return
    own = () if folder is None else (run_id_of(folder),)
    for directory in _directories(args.save)[: 2 if args.save_best else 1]:
        others = [iteration for iteration, run_id in run_ids(directory).items() if run_id not in own]
        if not others:
            continue
        shown = f"{', '.join(map(str, others[:5]))}{', ...' if len(others) > 5 else ''}"
        found = f"--save is {args.save!r}, but {directory} holds checkpoints of another run (iterations: {shown})"
        if folder is not None:
            found += f" than that of {folder}, which goes on: move them away"
        elif args.finetune:
            found += (", and --finetune begins a new one: leave it out and give --load "
                      f"{directory} to go on with that run, or give another --save")
        else:
            found += f": give --load {directory} to go on with that run, or another --save for a new one"
        yield (f"{found}; or add --allow-used-save to save beside them, which replaces those of the same iterations")


def tidy_up(run: Run) -> list[str]:
    """Delete what killed saves left where this run is going to save; returns notes.  The run must hold the lock."""
    return [] if run.args.save is None else [
        note for directory in _directories(run.args.save) for note in tidy(directory)]


def _directories(save: str) -> tuple[Path, Path]:
    return Path(save), Path(save) / BEST
