"""What a run starts from and reads, as rank 0 finds it before the run: weights, samples, questions.

Reads headers only and needs neither megatron nor a device.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mm.checkpoint.adapters import holds_adapters, open_adapters, open_base
from mm.checkpoint.directories import newest_checkpoint, run_id_of, run_ids, stated
from mm.checkpoint.mindspeed_layout import Layout
from mm.checkpoint.peft import is_peft_directory
from mm.checkpoint.source import Kind, QkvOrder, Source, find_kind, holds_nothing, open_to_train
from mm.checkpoint.training_files import tidy
from mm.config.args import Arguments
from mm.config.run import Run
from mm.data.encode import SampleEncoder
from mm.data.index.dataset import Dataset, Split, datasets
from mm.data.index.index import Measure
from mm.environment import named_in_script
from mm.errors import UserError, collected, refuse
from mm.run.schedule import Schedule
from mm.scoring.benchmarks import Items

BEST = "best"
"""Subdirectory of ``--save`` for the checkpoint with the lowest validation loss."""


@dataclass(frozen=True)
class Sources:
    """The weights that a run starts from; both None: random weights."""

    model: Source | None
    """A whole model: ``--load``, or the base model of adapters."""
    adapters: Source | None = None
    """``--load``, if it holds adapters."""

    def trained(self, run: Run) -> Source | None:
        """The source of the trained weights in ``--load``: adapters, or else the whole model."""
        return None if run.args.load is None else self.adapters if run.model.lora.is_on else self.model

    def checkpoint(self, run: Run) -> Path | None:
        """The training checkpoint in ``--load``; None if it holds none."""
        trained = self.trained(run)
        return trained.path if trained is not None and trained.kind is Kind.TRAINING else None


@dataclass(frozen=True)
class Samples:
    """The samples of a run, and the measure with their encoder."""

    measure: Measure
    splits: Mapping[Split, Dataset]

    @classmethod
    def open(cls, run: Run, with_validation: bool) -> "Samples":
        """Open the training samples, and with ``with_validation`` the validation samples if there are any.

        An existing index is used even with ``overwrite_cache``, because the rank that checks has just rebuilt it.
        Raises UserError as ``Measure.from_config`` and ``Dataset`` do.
        """
        data, problems = replace(run.data, overwrite_cache=False), []
        measure = Measure.from_config(data, run.model, run.args.seq_length)
        splits = datasets(data, problems, run.args.bad_sample == "skip", measure, run.args.seed, with_validation)
        refuse(problems)
        return cls(measure, splits)


@dataclass(frozen=True)
class Questions:
    """The questions that the model answers during training, and their encoder."""

    items: Items
    encoder: SampleEncoder


@dataclass
class Checked:
    """What rank 0 has decided and opened before the run; incomplete if there are problems."""

    run: Run
    """The run, with the number of steps that its epochs take and the rates of its schedule."""
    schedule: Schedule | None = None
    sources: Sources | None = None
    samples: Samples | None = None
    questions: Questions | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def qkv_order(run: Run) -> QkvOrder:
    """How to determine the order of the ViT's qkv in ``--load``."""
    base = run.data.model_name_or_path if os.path.isdir(run.data.model_name_or_path) else None
    return QkvOrder(run.args.vit_qkv_order, base, "--vit-qkv-order")


def with_start(run: Run) -> Run:
    """``run`` with the effective ``--load`` for this start.

    The same command starts a run and continues it: if ``--save`` holds a checkpoint of a run that this command started,
    or ``--load`` is ``--save`` and holds one, the run continues from it.  If ``--load`` is ``--save`` or absent, the
    run starts from ``--pretrained-checkpoint``, or without that flag from ``--load-base-model`` or
    ``model_name_or_path``, never from random weights.
    """
    args = run.args
    if _has_started(run):
        note = (f"--save {args.save} holds a checkpoint of the run that this command started: the run continues from "
                f"it; give another --save for a new run")
        base = args.pretrained_checkpoint if args.load is None else args.load
        args = replace(args, load=args.save, finetune=False, no_load_optim=False, no_load_rng=False)
        return replace(run, args=_with_base(run, args, base), notes=(*run.notes, note))
    if not args.may_begin:
        return run
    if args.load is not None and not holds_nothing(args.load):
        return _resumed(run)
    if (base := args.pretrained_checkpoint) is not None:
        if os.path.isdir(base) and not is_peft_directory(base):  # a dry run goes on without it
            find_kind(base, named_in_script("--pretrained-checkpoint", base, os.environ))
        return replace(run, args=replace(args, load=base, no_load_optim=True, no_load_rng=True))
    found = "" if args.load is None else f"--load {args.load} holds no checkpoint yet, so "
    begins = f"{found}the run starts from the weights of"
    if args.load_base_model is not None:
        note = f"{begins} {args.load_base_model} (--load-base-model)"
        args = replace(args, load=None if run.model.lora.is_on else args.load_base_model)
    else:
        note = f"{begins} {run.data.model_name_or_path} (model_name_or_path of {args.mm_data})"
        args = replace(args, load=run.data.model_name_or_path)
    return replace(run, args=args, notes=(*run.notes, note))


def _has_started(run: Run) -> bool:
    """Whether the newest checkpoint in ``--save`` is of a run that this command started, and has what it needs to
    continue."""
    args = run.args
    if args.save is None or args.loads_what_it_saves or args.allow_used_save:
        return False
    folder = newest_checkpoint(Path(args.save))
    if folder is None:
        return False
    try:
        newest = stated(folder)
    except UserError:  # reported with the other checkpoints in --save
        return False
    return newest.get("given_start") == run.given_start and newest.get("optimizer") is not None


def _with_base(run: Run, args: Arguments, base: str | None) -> Arguments:
    """``args`` with the base model of adapters that were trained on ``base``, if that is a whole model."""
    if base is None or not run.model.lora.is_on or args.load_base_model is not None:
        return args
    return replace(args, load_base_model=base) if os.path.isdir(base) and not holds_adapters(base) else args


def _resumed(run: Run) -> Run:
    """``run``, whose ``--load`` holds a checkpoint: flags for a new run are ignored."""
    args, base = run.args, run.args.pretrained_checkpoint
    if base is None:
        return run
    note = (f"--load {args.load} holds a checkpoint: the run continues from it, not from {base} "
            f"(--pretrained-checkpoint)")
    if args.finetune:
        note += ", so --finetune is ignored as well"
        args = replace(args, finetune=False)
    return replace(run, args=_with_base(run, args, base), notes=(*run.notes, note))


def open_start(run: Run, checkpoint: Path | None = None) -> Sources:
    """Open ``--load`` and ``--load-base-model``; raises UserError with all their problems.  ``checkpoint``: the one to
    open if ``--load`` holds several."""
    args, model, order = run.args, run.model, qkv_order(run)
    if checkpoint is not None:
        args = replace(args, load=str(checkpoint))
    if not model.lora.is_on:
        return Sources(None if args.load is None else open_to_train(args.load, model, args.loads_optimizer, order))
    problems: list[str] = []
    adapters = base = None
    base_path = args.load_base_model
    with collected(problems):
        if args.load is not None and holds_adapters(args.load):
            base_path = base_path or run.data.model_name_or_path
            adapters = open_adapters(args.load, model, Layout.of(model, args.tensor_model_parallel_size))
            if args.loads_optimizer:
                adapters.check_optimizer()
        elif args.load is not None and base_path is not None:
            raise UserError(
                f"--load {args.load} is a whole model, but --load-base-model names another, {base_path}; leave one of "
                f"them out, or give adapters as --load.")
        else:
            base_path = args.load or base_path
    with collected(problems):
        if base_path is not None:
            base = open_base(base_path, model, order)
    refuse(problems)
    return Sources(base, adapters)


# Which run owns the checkpoints in ``--save``: each has the id of the run that saved it


def continued(run: Run, sources: Sources) -> Path | None:
    """The checkpoint in ``--save``, or its subdirectory ``best``, that this run continues; None for a new run."""
    save, checkpoint = run.args.save, sources.checkpoint(run)
    if save is None or checkpoint is None or run.args.finetune:
        return None
    return checkpoint if checkpoint.resolve().is_relative_to(Path(save).resolve()) else None


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
