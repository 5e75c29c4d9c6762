"""One run, resolved: flags, model JSON, data JSON and world size, read together and checked together.

Every problem of all three is told at once.  Knows nothing of devices, torch or processes.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mm.config import rules
from mm.config.flags import Arguments, parse_flags
from mm.config.model import DataConfig, ModelConfig, RecomputeConfig, read_data, read_model
from mm.errors import UserError

Read = TypeVar("Read")


@dataclass(frozen=True)
class RunConfig:
    """All that a training run is told.  Every rule between its parts holds."""

    args: Arguments
    model: ModelConfig
    data: DataConfig
    world_size: int
    notes: tuple[str, ...] = ()
    """What was given and has no effect, or is missing in a dry run; to be shown once."""

    @property
    def num_stages(self) -> int:
        return self.model.num_stages

    @property
    def data_parallel_size(self) -> int:
        """Model replicas: what the world size leaves over."""
        return self.world_size // (self.args.tensor_model_parallel_size * self.num_stages)

    @property
    def global_batch_size(self) -> int:
        """Samples per step; one microbatch per replica unless ``--global-batch-size`` says more."""
        return self.args.global_batch_size or self.args.micro_batch_size * self.data_parallel_size

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one replica in one step."""
        return self.global_batch_size // (self.args.micro_batch_size * self.data_parallel_size)

    @property
    def precision(self) -> str:
        """"fp32", "bf16" or "fp16"."""
        return rules.precision(self.args)

    @property
    def loss(self) -> str:
        """"global_tokens" (mean over the target tokens of the global batch) or "per_sample"."""
        return "per_sample" if self.args.calculate_per_sample_loss else "global_tokens"

    @property
    def lr_decay_iters(self) -> int:
        """Step at which the lowest learning rate is reached."""
        return self.args.lr_decay_iters or self.args.train_iters

    @property
    def lr_warmup_iters(self) -> float:
        """Steps of warm-up; not always whole, because Megatron does not round the fraction."""
        if self.args.lr_warmup_fraction is not None:
            return self.args.lr_warmup_fraction * self.lr_decay_iters
        return self.args.lr_warmup_iters


def load_run(argv: Sequence[str], world_size: int | None = None,
             environment: Mapping[str, str] = os.environ) -> RunConfig:
    """Read and check everything; raises UserError with all problems of the flags and of both files.

    The world size is ``world_size`` if given, else WORLD_SIZE of the ``environment`` (torchrun sets it), else
    ``--world-size``, else 1.  With ``--dry-run`` a missing file or directory is a note instead of a problem.
    """
    parsed = parse_flags(argv)
    args, problems = parsed.arguments, list(parsed.problems)
    model_file = _attempt(read_model, args.mm_model, problems)
    data_file = _attempt(read_data, args.mm_data, problems)
    missing = _missing_paths(args, None if data_file is None else data_file.config)
    if model_file is None or data_file is None or parsed.problems:
        problems += [] if parsed.problems else rules.flag_problems(args)
        raise UserError(problems + ([] if args.dry_run else missing))
    model, data = _with_recompute_flags(model_file.config, args), data_file.config
    world_size = world_size or _world_size(args, environment, problems)
    problems += rules.problems(args, model, data, world_size)
    problems += rules.claim_problems(args, model_file)
    problems += [] if args.dry_run else missing
    if problems:
        raise UserError(problems)
    notes = (*parsed.notes, *_notes(args), *model_file.notes, *data_file.notes, *(missing if args.dry_run else ()))
    return RunConfig(args, model, data, world_size, notes)


def resolved(run: RunConfig) -> dict[str, Any]:
    """The whole run as JSON-ready values, what was derived included; to be written beside the logs."""
    whole = {
        "arguments": dataclasses.asdict(run.args),
        "model": dataclasses.asdict(run.model),
        "data": dataclasses.asdict(run.data),
        "world_size": run.world_size,
        "pipeline_model_parallel_size": run.num_stages,
        "data_parallel_size": run.data_parallel_size,
        "global_batch_size": run.global_batch_size,
        "num_microbatches": run.num_microbatches,
        "precision": run.precision,
        "loss": run.loss,
        "lr_decay_iters": run.lr_decay_iters,
        "lr_warmup_iters": run.lr_warmup_iters,
        "notes": run.notes,
    }
    return json.loads(json.dumps(whole))


def _attempt(read: Callable[[str], Read], path: str, problems: list[str]) -> Read | None:
    """What ``read`` returns, or None after adding its problems; a path that was not given is told elsewhere."""
    if not path:
        return None
    try:
        return read(path)
    except UserError as error:
        problems += error.problems
        return None


def _world_size(args: Arguments, environment: Mapping[str, str], problems: list[str]) -> int:
    launched = environment.get("WORLD_SIZE")
    if not (args.dry_run or args.check):
        problems += _launcher_problems(args, environment)
    if launched is None:
        return args.world_size or 1
    if not launched.isdecimal() or int(launched) < 1:
        problems.append(f"The environment variable WORLD_SIZE is {launched!r}; expected the number of ranks")
        return args.world_size or 1
    if args.world_size not in (None, int(launched)):
        problems.append(f"--world-size is {args.world_size}, but the launcher started {launched} ranks (WORLD_SIZE); "
                        f"leave the flag out, or unset the variable for a dry run")
    return int(launched)


def _launcher_problems(args: Arguments, environment: Mapping[str, str]) -> list[str]:
    """A run that waits for ranks which nobody started would wait until its time is up."""
    given = [name for name in ("WORLD_SIZE", "RANK") if name in environment]
    if len(given) == 1 and (given[0] == "RANK" or environment[given[0]] != "1"):
        missing = "RANK" if given[0] == "WORLD_SIZE" else "WORLD_SIZE"
        return [f"The environment variable {given[0]} is set, but {missing} is not; start the ranks with torchrun, "
                f"which sets both, or unset {given[0]} to train on one rank"]
    if not given and args.world_size not in (None, 1):
        return [f"--world-size is {args.world_size}, but no launcher started these ranks (WORLD_SIZE is not set); "
                f"start them with torchrun, or add --dry-run"]
    return []


def _with_recompute_flags(model: ModelConfig, args: Arguments) -> ModelConfig:
    """The flags count for each tower whose JSON says nothing of recompute."""
    flags = rules.recompute_flags(args)
    vision, language = (
        dataclasses.replace(tower, recompute=flags) if tower.recompute == RecomputeConfig() else tower
        for tower in (model.vision, model.language)
    )
    return dataclasses.replace(model, vision=vision, language=language)


def _missing_paths(args: Arguments, data: DataConfig | None) -> list[str]:
    directories, datasets = {}, ()
    if data is not None:
        directories[f"{args.mm_data}: model_name_or_path (a Hugging Face directory)"] = data.model_name_or_path
        directories[f"{args.mm_data}: dataset_dir"] = data.dataset_dir
        datasets = data.dataset
    if args.load is not None:
        directories["--load"] = args.load
    missing = [f"{what} is {path!r}, which is not a directory"
               for what, path in directories.items() if not Path(path).is_dir()]
    return missing + [f"{args.mm_data}: dataset is {path!r}, which is not a file"
                      for path in datasets if not Path(path).is_file()]


def _notes(args: Arguments) -> list[str]:
    notes = []
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        notes.append("command line: --sequence-parallel has no effect with one tensor-parallel rank")
    if args.recompute_method == "uniform" and (args.recompute_num_layers or 1) > 1:
        notes.append("command line: --recompute-num-layers has no effect with --recompute-method uniform: every layer "
                     "is a group of its own, which keeps one hidden state per layer")
    if args.recompute_granularity == "selective":
        notes.append("command line: --recompute-granularity selective has no effect: attention never keeps its score "
                     "matrix here, so there is nothing of it to recompute; full recomputes whole layers")
    if args.load is None:
        notes.append("command line: no --load, so training starts from random weights")
    if args.save is None:
        notes.append("command line: no --save, so no checkpoint will be written")
    if not args.fp16 and args.loss_scale is not None:
        notes.append("command line: --loss-scale has no effect without --fp16")
    return notes
