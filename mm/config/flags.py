"""The command line as a frozen dataclass, with Megatron's flag names, and its defaults unless the help says otherwise.

Each field of ``Arguments`` is one flag (``lr_decay_style`` is ``--lr-decay-style``), with its type, default and help in
that one place.  Every flag works; those that other programs know are in ``mm.config.foreign``.  Knows nothing of the
JSON files: rules that involve them are in ``mm.config.rules``.
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mm.config.foreign import INERT, UNSUPPORTED
from mm.errors import UserError, nearest


def _flag(default: Any, meaning: str, choices: tuple[str, ...] = (), least: float | None = None,
          is_required: bool = False) -> Any:
    """A field with its help.  A required one has a default all the same, for use after it was found missing."""
    return dataclasses.field(default=default, metadata={
        "help": meaning, "choices": choices, "least": least, "is_required": is_required,
    })


@dataclass(frozen=True)
class Arguments:
    """Everything that the command line says.  Counts are per optimizer step unless named otherwise."""

    # Files
    mm_model: str = _flag("", "model JSON", is_required=True)
    mm_data: str = _flag("", "data JSON", is_required=True)
    load: str | None = _flag(None, "weights or checkpoint to start from; absent = random weights")
    save: str | None = _flag(None, "directory of the training checkpoints")
    export_hf: str | None = _flag(None, "at the end, write the model in Hugging Face format to this directory")
    log_dir: str = _flag("logs", "directory of the resolved configuration and the metrics")
    tensorboard_dir: str | None = _flag(None, "directory of TensorBoard events")

    # Machines
    device: str = _flag("auto", "what to run on", choices=("auto", "npu", "cuda", "cpu"))
    world_size: int | None = _flag(None, "ranks for --dry-run and --check; a launcher sets WORLD_SIZE instead", least=1)
    tensor_model_parallel_size: int = _flag(1, "tensor-parallel ranks", least=1)
    pipeline_model_parallel_size: int | None = _flag(
        None, "pipeline stages; must equal the length of the pipeline lists, which decide when it is absent", least=1)
    virtual_pipeline_model_parallel_size: int | None = _flag(None, "chunks per stage; 1 is supported", least=1)
    context_parallel_size: int = _flag(1, "context-parallel ranks; 1 is supported", least=1)
    sequence_parallel: bool = _flag(False, "split norms and residuals along the tokens over the tensor-parallel ranks")
    distributed_timeout_minutes: int = _flag(10, "limit of one collective", least=1)

    # Batches and steps
    micro_batch_size: int = _flag(1, "samples per microbatch", least=1, is_required=True)
    global_batch_size: int | None = _flag(
        None, "samples per step over all ranks; absent = micro batch size x data-parallel size", least=1)
    seq_length: int = _flag(1, "longest sample in tokens", least=1, is_required=True)
    train_iters: int = _flag(1, "optimizer steps in all", least=1, is_required=True)
    exit_interval: int | None = _flag(None, "stop after a step that is a multiple of this", least=1)
    seed: int = _flag(1234, "seed of weights and shuffling", least=0)
    num_workers: int = _flag(2, "data worker processes per model replica", least=0)
    calculate_per_token_loss: bool = _flag(False, "mean over the target tokens of the global batch (our default)")
    calculate_per_sample_loss: bool = _flag(False, "mean over the samples of each sample's mean")

    # Optimizer (Adam)
    lr: float = _flag(0.0, "highest learning rate", least=0, is_required=True)
    min_lr: float = _flag(0.0, "lowest learning rate", least=0)
    lr_decay_style: str = _flag("linear", "shape of the decay",
                                choices=("constant", "linear", "cosine", "inverse-square-root"))
    lr_decay_iters: int | None = _flag(None, "step at which the lowest rate is reached; absent = train_iters", least=1)
    lr_warmup_iters: int = _flag(0, "steps of linear warm-up", least=0)
    lr_warmup_fraction: float | None = _flag(None, "warm-up as a fraction of the decay steps", least=0)
    lr_warmup_init: float = _flag(0.0, "learning rate at the start of the warm-up", least=0)
    weight_decay: float = _flag(0.01, "decoupled weight decay", least=0)
    adam_beta1: float = _flag(0.9, "decay of the first moment", least=0)
    adam_beta2: float = _flag(0.999, "decay of the second moment", least=0)
    adam_eps: float = _flag(1e-8, "added to the denominator", least=0)
    clip_grad: float = _flag(1.0, "largest global gradient norm; 0 = no clipping", least=0)
    use_distributed_optimizer: bool = _flag(False, "split optimizer state over the data-parallel ranks")
    overlap_grad_reduce: bool = _flag(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = _flag(False, "gather parameters during the forward pass")
    optimizer: str = _flag("adam", "optimizer", choices=("adam",))

    # Precision
    bf16: bool = _flag(False, "compute in bfloat16; neither --bf16 nor --fp16 = fp32")
    fp16: bool = _flag(False, "compute in float16 with loss scaling")
    loss_scale: float | None = _flag(None, "fixed loss scale; absent = dynamic", least=0)
    initial_loss_scale: float = _flag(float(2**32), "first dynamic loss scale", least=1)
    min_loss_scale: float = _flag(1.0, "lowest dynamic loss scale", least=0)
    loss_scale_window: int = _flag(1000, "steps without overflow before the scale is doubled", least=1)
    hysteresis: int = _flag(2, "overflows before the scale is halved", least=1)

    # Memory
    recompute_granularity: str | None = _flag(None, "recompute in towers whose JSON says nothing of it",
                                              choices=("full", "selective"))
    recompute_method: str | None = _flag(None, "which layers of a stage to recompute", choices=("uniform", "block"))
    recompute_num_layers: int | None = _flag(None, "layers per recomputed group (uniform) or in all (block)", least=1)

    # Checkpoints
    finetune: bool = _flag(False, "load weights only and start at step 0")
    no_load_optim: bool = _flag(False, "do not load optimizer state")
    no_load_rng: bool = _flag(False, "do not load random states")
    no_save_optim: bool = _flag(False, "do not save optimizer state")
    no_save_rng: bool = _flag(False, "do not save random states")
    save_interval: int | None = _flag(None, "steps between checkpoints; absent = only at the end", least=1)
    keep_last_checkpoints: int | None = _flag(None, "delete all but this many newest checkpoints; absent = keep all",
                                              least=1)

    # Reports
    log_interval: int = _flag(100, "steps between log lines", least=1)
    log_tps: bool = _flag(False, "add tokens per sample to the log line")
    log_throughput: bool = _flag(False, "add model FLOP/s to the log line")
    dry_run: bool = _flag(False, "check everything, print what each stage would hold, and stop")
    check: bool = _flag(False, "check everything, what must be there and every sample too, and stop")


@dataclass(frozen=True)
class ParsedFlags:
    """``arguments`` is complete even when there are ``problems``: a bad or missing value stands at its default."""

    arguments: Arguments
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def flag_name(field_name: str) -> str:
    """``lr_decay_style`` -> ``--lr-decay-style``."""
    return "--" + field_name.replace("_", "-")


def parse(argv: Sequence[str]) -> Arguments:
    """Read the command line; raises UserError with every problem in it."""
    parsed = parse_flags(argv)
    if parsed.problems:
        raise UserError(parsed.problems)
    return parsed.arguments


def parse_flags(argv: Sequence[str]) -> ParsedFlags:
    """Read the command line, collecting problems instead of raising, so that the JSON files can add theirs."""
    fields = {field.name: field for field in dataclasses.fields(Arguments)}
    found, strays = _parser(fields.values()).parse_known_args(list(argv))
    problems = _stray_problems(strays, fields)
    notes: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    for name, occurrences in vars(found).items():
        if occurrences is None:
            if name in fields and fields[name].metadata["is_required"]:
                problems.append(f"{flag_name(name)} is missing: {fields[name].metadata['help']}")
            continue
        flag = occurrences[0][0]
        if flag in UNSUPPORTED:
            problems.append(f"{flag} is not available here: {UNSUPPORTED[flag]}")
        elif flag in INERT:
            notes.setdefault(INERT[flag], []).append(flag)
        else:
            _take(fields[name], occurrences, values, problems)
    shown = tuple(f"command line: {why}; no effect: {', '.join(flags)}" for why, flags in notes.items())
    return ParsedFlags(Arguments(**values), tuple(problems), shown)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}")


class _Help(argparse.HelpFormatter):
    """Shows one value per flag, although the parser takes any number of them."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar or "")


class _Collect(argparse.Action):
    """Keeps every occurrence of a flag with its values, so that contradictions can be told apart from repetitions."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        occurrences = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*occurrences, (option_string, tuple(values))])


def _parser(fields: typing.Iterable[dataclasses.Field]) -> argparse.ArgumentParser:
    """All known flags, each taking any number of strings: values are checked later, all of them at once."""
    parser = _Parser("mm.train", description="Train Qwen2.5-VL with tensor, pipeline and data parallelism.",
                     usage="%(prog)s --mm-model JSON --mm-data JSON --micro-batch-size N --seq-length N "
                           "--train-iters N --lr X [flags]",
                     allow_abbrev=False, formatter_class=_Help)
    for field in fields:
        is_switch = field.type is bool
        has_default = field.default is not None and not is_switch and not field.metadata["is_required"]
        default = f" (default {field.default})" if has_default else ""
        meaning = (field.metadata["help"] + default).replace("%", "%%")
        metavar = "" if is_switch else "|".join(field.metadata["choices"]) or field.name.rsplit("_")[-1].upper()
        parser.add_argument(flag_name(field.name), nargs="*", action=_Collect, help=meaning, metavar=metavar)
    for flag in (*INERT, *UNSUPPORTED):
        parser.add_argument(flag, nargs="*", action=_Collect, help=argparse.SUPPRESS)
    return parser


def _stray_problems(strays: Sequence[str], fields: typing.Iterable[str]) -> list[str]:
    """Unknown flags with their nearest known one; the values after an unknown flag are part of it."""
    known = [*(flag_name(name) for name in fields), *INERT]
    problems, follows_flag = [], False
    for stray in strays:
        if stray.startswith("-"):
            flag = stray.split("=", 1)[0]
            problems.append(f"{flag} is not a known flag{nearest(flag, known)}; see --help")
        elif not follows_flag:
            problems.append(f"{stray!r} on the command line belongs to no flag")
        follows_flag = True
    return problems


def _take(field: dataclasses.Field, occurrences: list[tuple[str, tuple[str, ...]]], values: dict[str, Any],
          problems: list[str]) -> None:
    """Put the value of one given flag into ``values``, or say what is wrong with it."""
    flag = occurrences[0][0]
    if field.type is bool:
        values[field.name] = True
        given = [value for _, one in occurrences for value in one]
        if given:
            problems.append(f"{flag} takes no value, but has {' '.join(given)!r}; it is on when given, else off")
        return
    texts = []
    for _, given in occurrences:
        if len(given) != 1:
            what = f"has {len(given)} values ({' '.join(given)})" if given else "has no value"
            problems.append(f"{flag} {what}; expected one: {field.metadata['help']}")
            return
        texts.append(given[0])
    try:
        converted = [_convert(field, text) for text in texts]
    except ValueError as error:
        problems.append(f"{flag} {error}")
        return
    if len(set(converted)) > 1:
        problems.append(f"{flag} is given {len(texts)} times with different values: {', '.join(texts)}; keep one")
        return
    values[field.name] = converted[0]


def _convert(field: dataclasses.Field, text: str) -> Any:
    """The value of ``text`` for ``field``; raises ValueError with the end of a sentence that starts with the flag."""
    choices, least = field.metadata["choices"], field.metadata["least"]
    if choices:
        if text not in choices:
            raise ValueError(f"is {text!r}; expected one of {', '.join(choices)}")
        return text
    kind = _plain_type(field.type)
    if kind is str:
        if not text.strip():
            raise ValueError(f"is empty; expected {field.metadata['help']}")
        return text
    expected = "an integer" if kind is int else "a number"
    if least is not None:
        expected += f" of at least {least}"
    try:
        number = kind(text)
    except ValueError:
        raise ValueError(f"is {text!r}; expected {expected}") from None
    if not abs(number) < float("inf") or (least is not None and number < least):
        raise ValueError(f"is {text}; expected {expected}")
    return number


def _plain_type(annotation: Any) -> type:
    """``int`` for both ``int`` and ``int | None``."""
    if isinstance(annotation, types.UnionType):
        return next(one for one in typing.get_args(annotation) if one is not types.NoneType)
    return annotation
