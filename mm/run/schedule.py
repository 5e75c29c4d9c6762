"""How long a run is and how its learning rate changes, also if it continues with other settings.

Megatron's rules: a schedule setting that differs from the checkpoint's is an error, unless one of two flags selects
which to use.  Pure functions; needs neither megatron nor a device.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from mm.checkpoint.manifest import validated
from mm.checkpoint.source import Source
from mm.config.model import Rates
from mm.config.parse import NotNegative
from mm.config.run import Run
from mm.data.index.dataset import Dataset, TrainedOn
from mm.data.sampler.sampler import order_description
from mm.errors import UserError

_PARTS = {"vision": "the ViT", "projector": "the projector", "language": "the LLM"}
_MODULES = ("lr_scale_modules", "lr_mult", "weight_decay_exclude_modules")
OVERRIDE, USE_CHECKPOINT = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"


def consumed_by(source: Source, run: Run) -> int:
    """Samples that the training of ``source`` consumed; if unknown, those of as many steps of ``run``."""
    assert source.iteration is not None, "a training wrote it"
    return source.iteration * run.global_batch_size if source.consumed_samples is None else source.consumed_samples


def with_steps(run: Run, trained: Source | None, dataset: Dataset, notes: list[str]) -> Run:
    """``run``, which may continue from ``trained``, with the number of steps of its ``--num-train-epochs``, and a note.
    Raises UserError if the data changed and may not."""
    epochs = run.args.num_train_epochs
    assert epochs is not None, "the run has epochs"
    iteration = consumed = began_at = 0
    if trained is not None and trained.iteration is not None and not run.args.finetune:
        iteration, consumed = trained.iteration, consumed_by(trained, run)
        if (data := trained.manifest and trained.manifest.data) is not None:
            began_at = TrainedOn.from_json(data, trained.path).followed_by(
                dataset.fingerprints(), order_description(run), consumed, run.args.allow_new_data).began_at
    num_steps = num_steps_of(epochs, len(dataset), run.global_batch_size, iteration, consumed, began_at)
    notes.append(f"--num-train-epochs {epochs:g}: {epochs:g} x {len(dataset)} training samples in steps of "
                 f"{run.global_batch_size} make {num_steps} iterations")
    return replace(run, args=replace(run.args, train_iters=num_steps))


def num_steps_of(
    epochs: float, num_samples: int, global_batch_size: int, iteration: int = 0, consumed: int = 0, began_at: int = 0
) -> int:
    """The iteration after which a run has seen ``num_samples`` samples ``epochs`` times.

    No sample is dropped, so an epoch ends within a step if the batch size does not divide it, and only the last step is
    rounded up, like an accumulated step in Hugging Face's trainer.  ``iteration`` and ``consumed`` are the run's
    progress, and ``began_at`` is the number of samples consumed before it began with this data.
    """
    last = began_at + num_samples * Fraction(repr(epochs))  # exact decimal value: 0.29 x 100 is 29
    return iteration + max(0, math.ceil((last - consumed) / global_batch_size))


@dataclass(frozen=True)
class LearningRate:
    """The learning rate as a function of the samples consumed before the step (Megatron's rule)."""

    max_lr: NotNegative
    min_lr: NotNegative
    warmup_init: NotNegative
    warmup_samples: NotNegative
    decay_samples: NotNegative
    decay_style: str
    """"constant", "linear", "cosine" or "inverse-square-root"."""

    def at(self, consumed_samples: int) -> float:
        """The rate of the step that begins after ``consumed_samples``."""
        if self.warmup_samples > 0 and consumed_samples <= self.warmup_samples:
            return self.warmup_init + (self.max_lr - self.warmup_init) * consumed_samples / self.warmup_samples
        if self.decay_style == "constant":
            return self.max_lr
        if consumed_samples > self.decay_samples:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            warmup, now = max(self.warmup_samples, 1), max(consumed_samples, 1)
            return max(self.min_lr, self.max_lr * math.sqrt(warmup / now))
        ratio = (consumed_samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        coefficient = 1.0 - ratio if self.decay_style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
        return self.min_lr + coefficient * (self.max_lr - self.min_lr)


@dataclass(frozen=True)
class Schedule:
    """The schedule of learning rates and weight decay; saved in checkpoints."""

    learning_rate: LearningRate
    weight_decay: NotNegative
    parts: Mapping[str, Mapping[str, float | None]]
    """Part of the model -> its "lr" and "weight_decay"; None for the values above."""
    modules: Mapping[str, Any]
    """Flags that change rates of single weights, by field name."""
    global_batch_size: int
    """For messages: the schedule itself counts samples."""
    began_at: int = 0
    """Samples consumed before the schedule began."""

    @classmethod
    def of(cls, run: Run, began_at: int = 0) -> "Schedule":
        """The schedule from the run's settings."""
        args, model = run.args, run.model
        learning_rate = LearningRate(
            args.lr, args.min_lr, args.lr_warmup_init, run.lr_warmup_iters * run.global_batch_size,
            run.lr_decay_iters * run.global_batch_size, args.lr_decay_style)
        parts = {part: asdict(getattr(model, part).rates) for part in _PARTS}
        modules = {name: getattr(args, name) for name in _MODULES}
        return cls(learning_rate, args.weight_decay, parts, modules, run.global_batch_size, began_at)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], folder: Path) -> "Schedule":
        """The inverse of ``to_json``, from the manifest in ``folder``; raises UserError for other content."""
        found = validated(cls, content, folder, "schedule")
        modules = {name: tuple(value) if isinstance(value, list) else value for name, value in found.modules.items()}
        return replace(found, modules=modules)

    def to_json(self) -> dict[str, Any]:
        """The form stored in a manifest."""
        return asdict(self)

    def at(self, consumed_samples: int) -> float:
        """The rate of the step that begins after ``consumed_samples``."""
        return self.learning_rate.at(consumed_samples - self.began_at)

    def put_into(self, run: Run) -> Run:
        """``run`` with the rates of this schedule; the schedule's length is not transferred."""
        rate = self.learning_rate
        args = replace(run.args, lr=rate.max_lr, min_lr=rate.min_lr, lr_warmup_init=rate.warmup_init,
                       lr_decay_style=rate.decay_style, weight_decay=self.weight_decay, **self.modules)
        parts = {part: replace(getattr(run.model, part), rates=Rates(**self.parts[part])) for part in _PARTS}
        return replace(run, args=args, model=replace(run.model, **parts))


def scheduled(run: Run, trained: Source | None) -> tuple[Run, Schedule, tuple[str, ...]]:
    """The run with the effective rates, their schedule, and notes; ``trained``: the weights that it continues from.
    Raises UserError naming each setting that differs from the checkpoint's, unless a flag selects which to use."""
    args, now = run.args, Schedule.of(run)
    if trained is None or trained.iteration is None or args.finetune:
        return run, now, ()
    if args.no_load_optim:
        return run, replace(now, began_at=consumed_by(trained, run)), (
            f"--no-load-optim: the learning-rate schedule restarts after iteration {trained.iteration}, as in "
            f"Megatron",)
    content = None if trained.manifest is None else trained.manifest.schedule
    if content is None:
        return run, now, (f"{trained.path}, which an older version saved, does not have its learning-rate schedule; "
                          f"the command line's is used",)
    then = Schedule.from_json(content, trained.path)
    changes = list(changed(then, now)) if trained.iteration < args.train_iters else []  # else nothing is trained
    if args.override_opt_param_scheduler:
        return run, replace(now, began_at=then.began_at), tuple(f"{OVERRIDE}: {change}" for change in changes)
    if changes and not args.use_checkpoint_opt_param_scheduler:
        raise UserError(
            f"the learning-rate schedule differs from the checkpoint {trained.path}: {'; '.join(changes)}.  Give "
            f"the same settings; or add {USE_CHECKPOINT}, which continues with the checkpoint's; or {OVERRIDE}, "
            f"which uses the command line's from here on; or --finetune, which starts at step 0.")
    notes = tuple(f"{USE_CHECKPOINT} continues with the checkpoint's settings: {change}" for change in changes)
    return then.put_into(run), then, notes


def changed(then: Schedule, now: Schedule) -> Iterator[str]:
    """Settings that changed and have an effect, by flag name and with both values."""
    old, new, batches = then.learning_rate, now.learning_rate, (then.global_batch_size, now.global_batch_size)
    decays = new.decay_style != "constant" or old.decay_style != "constant"
    simple = [("--lr", old.max_lr, new.max_lr), ("--lr-decay-style", old.decay_style, new.decay_style),
              ("--weight-decay", then.weight_decay, now.weight_decay)]
    simple += [("--min-lr", old.min_lr, new.min_lr)] if decays else []
    simple += [("--lr-warmup-init", old.warmup_init, new.warmup_init)] if new.warmup_samples else []
    for name, before, after in simple:
        if before != after:
            yield f"{name} was {_shown(before)} and is {_shown(after)} now"
    flags = "--lr-warmup-iters or --lr-warmup-fraction"
    yield from _changed_end(f"the warm-up ({flags})", old.warmup_samples, new.warmup_samples, *batches)
    if decays:
        flags = "--lr-decay-iters, or without it --train-iters or --num-train-epochs"
        yield from _changed_end(f"the decay ({flags})", old.decay_samples, new.decay_samples, *batches)
    for part, name in _PARTS.items():
        for key, word in (("lr", "learning rate"), ("weight_decay", "weight decay")):
            before, after = then.parts[part][key], now.parts[part][key]
            if before != after:
                yield f"the {word} of {name} was {_shown(before)} and is {_shown(after)} now"
    for name in _MODULES:
        if then.modules[name] != now.modules[name]:
            flag = "--" + name.replace("_", "-")
            yield f"{flag} was {_shown(then.modules[name])} and is {_shown(now.modules[name])} now"


def _changed_end(what: str, before: float, after: float, batch_before: int, batch_after: int) -> Iterator[str]:
    if not math.isclose(before, after, rel_tol=1e-9):  # a fraction of iterations, times samples, rounds
        yield (f"{what} ended after {before:g} samples ({before / batch_before:g} steps x --global-batch-size "
               f"{batch_before}) and ends after {after:g} now ({after / batch_after:g} x {batch_after})")


def _shown(value: Any) -> str:
    if value is None:
        return "that of the others"
    return " ".join(value) or "absent" if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else (
        str(value))
