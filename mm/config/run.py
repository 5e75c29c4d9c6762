"""One training run: flags, model JSON, data JSON and world size, read and checked together.

All problems are reported together, before torch is loaded.  Every machine reads its own command line and JSON files, so
this file also says which settings must be equal on all ranks.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from pydantic_core import to_jsonable_python

from mm.config.args import TRAIN, Arguments
from mm.config.command_line import Words, flag_name
from mm.config.data import DataConfig, dataset_files, read_data
from mm.config.lora import lora_notes, lora_problems, merged
from mm.config.model import ModelConfig, placement_notes, read_model
from mm.config.parse import LOCAL, Document, changed, fields_of, shown
from mm.config.rules import (
    ACTIVATION_FLAGS,
    RATE_FLAGS,
    RATE_KEYS,
    flag_notes,
    flag_problems,
    frozen_notes,
    loss_problems,
    overridden_notes,
    parallel_problems,
    sampling_notes,
    sharding_notes,
    sums_lists,
    validation_notes,
    validation_problems,
)
from mm.environment import Launched, named_in_script, world_problems
from mm.errors import UserError, attempt, collected, redacted, refuse
from mm.files import is_same_directory

_PRECISION_KEYS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "fp32": {"fp16": (False,), "bf16": (False,), "params_dtype": ("fp32", "float32")},
    "bf16": {"fp16": (False,), "bf16": (True,), "params_dtype": ("bf16", "bfloat16")},
    "fp16": {"fp16": (True,), "bf16": (False,), "params_dtype": ("fp16", "float16")},
}
"""Precision of the flags -> keys of each tower in the model JSON that repeat it -> the values that agree."""

_PATTERNS = ("freeze_modules", "trainable_modules")
"""Flags that may be in the model JSON instead."""


@dataclass(frozen=True)
class Run:
    """The settings of a training run.  Every rule between them holds."""

    args: Arguments
    model: ModelConfig
    data: DataConfig
    world_size: int
    notes: tuple[str, ...] = ()
    """Notes on settings that change results or have no effect; to be printed once."""
    missing: tuple[str, ...] = ()
    """Files and directories that a run needs, and this dry run does not."""
    given_start: Mapping[str, str | None] | None = None
    """``Arguments.given_start`` of the command line; the files may change ``args.load``."""

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return self.args.tensor_model_parallel_size

    @property
    def cp_size(self) -> int:
        """Context-parallel ranks."""
        return self.args.context_parallel_size

    @property
    def is_ring(self) -> bool:
        """Whether context parallelism sends keys and values around a ring; otherwise it exchanges heads."""
        return self.args.context_parallel_algo == "megatron_cp_algo"

    @property
    def num_pieces(self) -> int:
        """Number of pieces into which sequence parallelism cuts rows; 1 without it."""
        return self.tp_size if self.args.sequence_parallel else 1

    @property
    def num_encoders(self) -> int:
        """Ranks of a stage over which the images of a microbatch are divided."""
        return self.cp_size * (self.tp_size if self.model.encodes_whole else 1)

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return self.model.num_stages

    @property
    def num_chunks(self) -> int:
        """Chunks of each stage; 1 without virtual pipeline stages."""
        return self.model.num_chunks

    @property
    def dp_size(self) -> int:
        """Data-parallel size, the number of model replicas: world size / size of a replica."""
        return self.world_size // (self.tp_size * self.cp_size * self.num_stages)

    @property
    def num_copies(self) -> int:
        """Ranks that hold the same weights, over the data and context axes."""
        return self.dp_size * self.cp_size

    @property
    def shards_gradients(self) -> bool:
        """Whether each rank keeps its shard of the gradients only; a rank without peers keeps all."""
        return self.args.shards_gradients and self.num_copies > 1

    @property
    def shards_weights(self) -> bool:
        """Whether each rank keeps its shard of the weights only."""
        return self.args.shards_weights and self.num_copies > 1

    @property
    def global_batch_size(self) -> int:
        """Samples per step; one microbatch per replica without ``--global-batch-size``."""
        return self.args.global_batch_size or self.args.micro_batch_size * self.dp_size

    @property
    def num_microbatches(self) -> int | None:
        """Microbatches of one replica in one step; None with packs, whose number differs by step and replica."""
        return None if self.data.packs else self.global_batch_size // (self.args.micro_batch_size * self.dp_size)

    @property
    def microbatch_unit(self) -> int:
        """With packs, each replica has a multiple of this: a chunk processes as many in a row as there are stages."""
        return self.num_stages if self.num_chunks > 1 else 1

    @property
    def held_microbatches(self) -> int:
        """Microbatches of a replica in one step with which every stage holds its maximum of activations."""
        most = self.global_batch_size - (self.dp_size - 1) * self.microbatch_unit
        return min(2 * self.num_stages, most) if self.num_microbatches is None else self.num_microbatches

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


def load_run(
    argv: Sequence[str], world_size: int | None = None, environment: Mapping[str, str] = os.environ,
    checks_layout: bool = True,
) -> Run:  # fmt: skip
    """Read and check everything; raises UserError with all problems of the flags and of both files.

    The world size is ``world_size`` if given, else WORLD_SIZE of the ``environment`` (torchrun sets it), else
    ``--world-size``, else 1.  With ``--dry-run`` a missing file or directory is no problem.
    ``checks_layout``: also check that the sizes of parallel groups and batches fit each other.
    """
    words = TRAIN.split(argv)
    problems: list[str] = []
    args = attempt(TRAIN.read, words, problems)
    problems += flag_problems(args) if args else ()
    model_path, data_path = words.last("--mm-model"), words.last("--mm-data")
    model, data = attempt(read_model, model_path, problems), attempt(read_data, data_path, problems)
    missing = list(_missing_paths(words, data.value if data else None, environment))
    is_dry_run = "--dry-run" in words.given
    problems += [] if is_dry_run else missing
    if not (args and model and data):
        raise UserError(problems)
    is_rehearsal = args.dry_run or args.check
    problems += world_problems(environment, args.world_size, None if is_rehearsal else "--dry-run")
    world_size = world_size or Launched.here(environment).num_ranks or args.world_size or 1
    notes = (*TRAIN.notes(words), *flag_notes(args), *sampling_notes(args, data.value),
             *validation_notes(args, data.value), *frozen_notes(args, model.value),
             *overridden_notes(args, model.value),
             *placement_notes(model.value, args.tensor_model_parallel_size, args.mm_model),
             *lora_notes(model.value.lora, args.lora, args.mm_model), *model.notes, *data.notes)
    run = Run(args, _with_flags(model.value, args), data.value, world_size, notes, tuple(missing), args.given_start)
    run = replace(run, notes=(*run.notes, *sharding_notes(args, run.num_copies)))
    refuse((*problems, *(parallel_problems(run) if checks_layout else ()), *loss_problems(args, data.value),
            *validation_problems(args, data.value), *_model_problems(run, model.document),
            *lora_problems(model.value.lora, args.lora, model.document, words.given), *_adapter_problems(run)))
    return run


def resolved(run: Run) -> dict[str, Any]:
    """The whole run as JSON values, including derived numbers, for the file beside the logs; no credentials in URLs."""
    found = to_jsonable_python({
        "arguments": run.args, "model": run.model, "data": run.data, "world_size": run.world_size,
        "pipeline_model_parallel_size": run.num_stages,
        "virtual_pipeline_model_parallel_size": run.num_chunks, "data_parallel_size": run.dp_size,
        "global_batch_size": run.global_batch_size, "num_microbatches": run.num_microbatches,
        "precision": run.args.precision, "loss_unit": run.args.loss_unit,
        "lr_decay_iters": run.lr_decay_iters, "lr_warmup_iters": run.lr_warmup_iters, "notes": run.notes,
    })
    return json.loads(redacted(json.dumps(found)))


def _with_flags(model: ModelConfig, args: Arguments) -> ModelConfig:
    """``model`` with the flags' settings where its JSON has none, and on one stage if the flags say so."""
    vision, language = (
        replace(tower, **{name: getattr(args, name) for name in ACTIVATION_FLAGS
                                      if not changed(getattr(tower, name))})
        for tower in (model.vision, model.language)
    )
    parts: dict[str, Any] = {"vision": vision, "projector": model.projector, "language": language}
    for part, flag in RATE_FLAGS.items():
        if parts[part].rates.lr is None:
            rates = replace(parts[part].rates, lr=getattr(args, flag))
            parts[part] = replace(parts[part], rates=rates)
    parts |= {name: getattr(model, name) or getattr(args, name) for name in _PATTERNS}
    parts["lora"] = merged(model.lora, args.lora)
    found = replace(model, **parts)
    return found.on_one_stage if sums_lists(args, model) else found


def _missing_paths(words: Words, data: DataConfig | None, environment: Mapping[str, str]) -> Iterator[str]:
    data_path = words.last("--mm-data")
    directories = {flag: words.last(flag) for flag in ("--load", "--load-base-model")}
    load = words.last("--load")
    if is_same_directory(load, words.last("--save")) and not os.path.exists(load or ""):
        del directories["--load"]  # the run creates it
    is_resumed = load is not None and os.path.isdir(load) and any(Path(load).glob("iter_*"))
    if not is_resumed:  # a resumed run does not need it any more
        base = words.last("--pretrained-checkpoint")
        directories[named_in_script("--pretrained-checkpoint", base, environment)] = base
    if data:
        directories[f"{data_path}: model_name_or_path (a Hugging Face directory)"] = data.model_name_or_path
        directories[f"{data_path}: dataset_dir"] = data.dataset_dir
    for what, path in directories.items():
        if path and not os.path.isdir(path):
            yield f"{what} is {path!r}, which is not a directory"
    if (path := words.last("--eval-generate-questions")) and not os.path.isfile(path):
        yield f"--eval-generate-questions is {path!r}, which is not a file"
    problems: list[str] = []
    if data:
        for key in ("dataset", "val_dataset"):
            with collected(problems, f"{data_path}: "):
                dataset_files(data, key)
    yield from dict.fromkeys(problems)


def _model_problems(run: Run, document: Document) -> Iterator[str]:
    """Contradictions between the model JSON and the flags."""
    args, limit = run.args, run.model.language.max_position_embeddings
    most_patches = args.seq_length * args.micro_batch_size * run.model.vision.spatial_merge_size**2
    if args.dry_run_patches is not None and args.dry_run_patches > most_patches:
        yield (f"--dry-run-patches is {args.dry_run_patches}, but the {args.seq_length} x {args.micro_batch_size} "
               f"tokens of a microbatch (--seq-length x --micro-batch-size) allow at most {most_patches}")
    if args.seq_length > limit:
        yield (f"--seq-length is {args.seq_length}; expected at most text_decoder.max_position_embeddings = {limit} of "
               f"{args.mm_model}")
    contrary = [
        f"{document.at(key_path)} is {shown(document.get(key_path))}"
        for tower in ("image_encoder.vision_encoder", "image_encoder.vision_projector", "text_decoder")
        for key, values in _PRECISION_KEYS[args.precision].items()
        if document.get(key_path := f"{tower}.{key}") not in (None, *values)
    ]
    if contrary:
        flag = "Neither --bf16 nor --fp16 is given" if args.precision == "fp32" else f"--{args.precision} is given"
        yield f"{flag}, which means {args.precision}, but {', '.join(contrary)}; change the flag or the file"
    for part, flag in RATE_FLAGS.items():
        given, key_path = getattr(args, flag), f"{RATE_KEYS[part]}_lr"
        if None not in (given, document.get(key_path)) and given != document.get(key_path):
            yield (f"{flag_name(flag)} is {given:g}, but {document.at(key_path)} is {document.get(key_path):g}; both "
                   f"are the learning rate of one part, so keep one")
    for name in _PATTERNS:
        given, found = getattr(args, name), document.get(name)
        if given and found and list(given) != found:
            yield (f"{flag_name(name)} is {' '.join(given)}, but {document.at(name)} is {shown(found)}; both set the "
                   f"same for all parts, so keep one")
    own = [f"{key}_lr" if document.get(f"{key}_lr") is not None else flag_name(RATE_FLAGS[part])
           for part, key in RATE_KEYS.items() if getattr(run.model, part).rates.lr is not None]
    if own and args.lr == 0.0:
        yield (f"--lr is 0, but {' and '.join(own)} is not; all rates follow the schedule of --lr in proportion. To "
               f"train only some parts, set --lr above 0 and freeze to true in the others")


def _adapter_problems(run: Run) -> Iterator[str]:
    """Flags that need adapters."""
    for name in ("load_base_model", "export_merged_hf"):
        begins = (name == "load_base_model" and run.args.loads_what_it_saves
                  and run.args.pretrained_checkpoint is None)
        if not (run.model.lora.is_on or begins) and (path := getattr(run.args, name)) is not None:
            yield (f"{flag_name(name)} is {path!r}, but there are no adapters; select linear layers for them with "
                   f"--lora-target-modules, or remove the flag"
                   f"{'; or set --load to --save, so that the same command starts a run with it' * (name[0] == 'l')}")


_OF_A_START = {"finetune", "load", "no_load_optim", "no_load_rng", "load_base_model", "pretrained_checkpoint"}
"""Rank 0 decides these for all ranks, by what ``--save`` holds."""


def shared_settings(run: Run) -> dict[str, str]:
    """The settings that all ranks must have in common, by the name that messages use."""
    args, data = (
        {name: getattr(one, name) for name, field in fields_of(type(one)).items() if LOCAL not in field.metadata}
        for one in (run.args, run.data))
    return {**{flag_name(name): text for name, text in _flattened(args)},
            **{f"{name} of --mm-model": text for name, text in _flattened({"": run.model})},
            **{f"{name} of --mm-data": text for name, text in _flattened(data)}}


def with_own_paths(run: Run, own: Run) -> Run:
    """``run``, which rank 0 has decided, with the paths and data workers of this machine's command line."""
    kept = {name: getattr(own.args, name) for name, field in fields_of(type(own.args)).items()
            if LOCAL in field.metadata and name not in _OF_A_START}
    return replace(run, args=replace(run.args, **kept), data=own.data)


def _flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in to_jsonable_python(settings).items():
        name = f"{prefix}.{key}".strip(".")
        if isinstance(value, dict):
            yield from _flattened(cast(dict[str, Any], value), name)
        else:
            yield name, json.dumps(value)
