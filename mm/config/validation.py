"""Rules and notes on the settings of validation and of questions during training."""

from collections.abc import Iterator

from mm.config.args import Arguments
from mm.config.command_line import flag_name
from mm.config.data import DataConfig
from mm.config.notes import NoEffect
from mm.config.schema import changed


def validates(args: Arguments, data: DataConfig) -> bool:
    """Whether there are samples for validation, and validation is not turned off."""
    return data.has_validation and args.eval_iters != 0


def is_due(args: Arguments, iteration: int) -> bool:
    """Whether a validation follows this step; independent of earlier steps, so a resumed run keeps the interval."""
    return iteration % args.eval_interval == 0 or iteration == args.train_iters


def asks(args: Arguments, iteration: int) -> bool:
    """Whether the model answers questions after this step, by the same rule as ``is_due``."""
    interval = args.eval_generate_interval
    return interval is not None and (iteration % interval == 0 or iteration == args.train_iters)


def validation_problems(args: Arguments, data: DataConfig) -> Iterator[str]:
    """Flags that need validation, if there is none, and questions without a rule."""
    wants = [flag for flag, is_given in (("--save-best", args.save_best),
                                         ("--early-stopping-patience", args.early_stopping_patience)) if is_given]
    if wants and not validates(args, data):
        why = "--eval-iters is 0; raise or remove it" if args.eval_iters == 0 else (
            f"{args.mm_data} has neither val_dataset nor val_rate; add one of them to its basic_parameters")
        yield f"{' and '.join(wants)}: there is no validation: {why}"
    if args.eval_generate_questions is not None and args.eval_generate_rule is args.eval_generate_benchmark is None:
        yield ("--eval-generate-questions needs --eval-generate-benchmark if it is a benchmark's file, or "
               "--eval-generate-rule to score your own questions")


def validation_notes(args: Arguments, data: DataConfig) -> Iterator[str]:
    """Settings without effect."""
    given = [name for name in ("eval_interval", "eval_iters") if name in changed(args)]
    if given and not data.has_validation:
        yield NoEffect(map(flag_name, given),
                       f"without val_dataset or val_rate in {args.mm_data} there is no validation")
