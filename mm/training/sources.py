"""Opens ``--load`` and ``--load-base-model``.

Reads headers only and needs neither megatron nor a device, because the preflight uses it too.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from mm.config.flags import Arguments
from mm.config.run import Run
from mm.conversion.adapters import holds_adapters, open_adapters, open_base
from mm.environment import named_in_script
from mm.errors import UserError, collected, refuse
from mm.formats.adapter import is_peft_directory
from mm.formats.checkpoints import find_checkpoint, newest_checkpoint, stated
from mm.formats.layout import Layout
from mm.formats.qkv_order import QkvOrder
from mm.formats.source import Kind, Source, find_kind, holds_nothing, open_to_train


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
    continue.
    """
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

    def at(self, checkpoint: "Checkpoint | None") -> "Sources | None":
        """These sources with the notes of ``checkpoint``; None if they were opened from another one."""
        if checkpoint is None:
            return self
        name = next((name for name, one in (("adapters", self.adapters), ("model", self.model))
                     if one is not None and one.path == checkpoint.path), None)
        if name is None:
            return None
        return replace(self, **{name: replace(getattr(self, name), notes=checkpoint.notes)})


def consumed_by(source: Source, run: Run) -> int:
    """Samples consumed by the training that wrote ``source``; if unknown, those of as many steps of ``run``."""
    assert source.iteration is not None, "a training wrote it"
    return source.iteration * run.global_batch_size if source.consumed_samples is None else source.consumed_samples


@dataclass(frozen=True)
class Checkpoint:
    """A training checkpoint in ``--load``."""

    path: Path
    notes: tuple[str, ...]
    """For the user: what interrupted saves left behind."""


def checkpoint_of(run: Run) -> Checkpoint | None:
    """The training checkpoint in ``--load``, found by file names only; None if there is none.

    Raises UserError as ``open_start`` does.
    """
    load = run.args.load
    if load is None or is_peft_directory(load) or find_kind(load) is not Kind.TRAINING:
        return None
    return Checkpoint(*find_checkpoint(load))


def open_start(run: Run, checkpoint: Checkpoint | None = None) -> Sources:
    """Open ``--load`` and ``--load-base-model``; raises UserError with all their problems.

    ``checkpoint``: the one to open if ``--load`` holds several.
    """
    args, model, order = run.args, run.model, qkv_order(run)
    if checkpoint is not None:
        args = replace(args, load=str(checkpoint.path))
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
