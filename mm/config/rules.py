"""Rules between the flags of a training, its model JSON and its data JSON, and notes on settings without effect.

Rules of single fields are in ``mm.config.args``, those of one JSON file beside its fields.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mm.config.args import PHASE_SECONDS, Arguments
from mm.config.command_line import flag_name, rule_notes, rule_problems
from mm.config.data import DataConfig
from mm.config.layers import activation_notes, activation_problems
from mm.config.model import ModelConfig
from mm.config.parse import changed
from mm.console import whole_number
from mm.errors import NoEffect, nearest

if TYPE_CHECKING:
    from mm.config.run import Run

RATE_KEYS = {"vision": "image_encoder.vision_encoder.vision", "projector": "image_encoder.vision_projector.projector",
              "language": "text_decoder.language"}
"""Part -> prefix of the keys of its rates in the model JSON."""
RATE_FLAGS = {"vision": "vision_tower_lr", "projector": "mm_projector_lr"}
"""Part -> the flag for its learning rate."""
ACTIVATION_FLAGS = {
    "recompute": ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    "offload": ("cpu_offload_activations", "cpu_offloading_num_layers"),
}
"""Setting of a tower -> the flags that give it where the model JSON does not."""
_GONE_PHASE = "dying"
"""A phase of earlier versions, whose limit has no effect."""
_DYNAMIC_SCALE_FLAGS = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def flag_problems(args: Arguments) -> Iterator[str]:
    """Rules between flags."""
    yield from rule_problems(args)
    if args.overlap_param_gather and not args.splits_optimizer:
        yield ("--overlap-param-gather needs split optimizer state: --use-distributed-optimizer, or "
               "--data-parallel-sharding-strategy optim, optim_grads or optim_grads_params")
    if args.use_distributed_optimizer and not args.splits_optimizer:
        yield ("--use-distributed-optimizer and --data-parallel-sharding-strategy no_shard contradict each other; "
               "remove the first, or write optim for no_shard")
    if args.save_retain_interval is not None and args.save_retain_interval % (args.save_interval or 1):
        yield (f"--save-retain-interval is {args.save_retain_interval}; expected a multiple of --save-interval = "
               f"{args.save_interval}, because no other iterations are saved at intervals")
    for word in args.phase_timeouts:
        name, _, seconds = word.partition("=")
        if name not in (*PHASE_SECONDS, _GONE_PHASE):
            yield (f"--phase-timeouts has {word!r}, but {name!r} is no phase{nearest(name, PHASE_SECONDS)}; expected "
                   f"NAME=SECONDS with a name of {', '.join(PHASE_SECONDS)}")
        elif whole_number(seconds) is None:
            yield f"--phase-timeouts has {word!r}; expected a whole number of seconds after {name}=, 0 for no limit"
    yield from activation_problems(args.recompute, args.offload, _activation_flag)
    if args.min_lr > args.lr:
        yield f"--min-lr is {args.min_lr:g}, above --lr = {args.lr:g}"
    if args.profile and args.profile_step_start >= args.profile_step_end:
        yield (f"--profile-step-start is {args.profile_step_start}; expected less than --profile-step-end = "
               f"{args.profile_step_end}, before which the profiler stops")
    if args.train_iters:
        yield from step_problems(args)
    elif args.num_train_epochs is None:
        yield "--train-iters is 0; expected at least 1, or --num-train-epochs"


def step_problems(args: Arguments) -> Iterator[str]:
    """Rules between flags and the number of steps, which with ``--num-train-epochs`` follows from the samples."""
    if args.lr_warmup_iters >= (decay_iters := args.lr_decay_iters or args.train_iters):
        yield (f"--lr-warmup-iters is {args.lr_warmup_iters}; expected fewer than the {decay_iters} decay steps "
               f"({'--lr-decay-iters' if args.lr_decay_iters else '--train-iters'})")
    for name, needed in (("profile_pipeline", True), ("profile_step_start", args.profile)):
        if needed and (getattr(args, name) or 0) > args.train_iters:
            yield (f"{flag_name(name)} is {getattr(args, name)}, but the last iteration is --train-iters = "
                   f"{args.train_iters}; give one from 1 to {args.train_iters}")


def _activation_flag(key: str) -> str:
    return "--cpu-offload-activations" if key == "cpu_offloading_activations" else flag_name(key)


def flag_notes(args: Arguments) -> Iterator[str]:
    """Settings that have no effect, and important settings that are absent."""
    if (args.load, args.load_base_model, args.pretrained_checkpoint) == (None, None, None):
        yield "--load is absent: training starts from random weights"
    if args.save is None:
        interval = f", despite --save-interval {args.save_interval}" if args.save_interval else ""
        yield f"--save is absent: no checkpoint will be written{interval}"
    yield from activation_notes(args.recompute, args.offload, _activation_flag)
    yield from rule_notes(args)
    dynamic_flags = [flag_name(name) for name in _DYNAMIC_SCALE_FLAGS if name in changed(args)]
    for names, reason, is_idle in (
        (["--sequence-parallel"], "there is one tensor-parallel rank",
         args.sequence_parallel and args.tensor_model_parallel_size == 1),
        (["--pretrained-checkpoint"], f"--load is {args.load}, which is not the directory of --save",
         args.pretrained_checkpoint is not None and not args.may_begin),
        (["--accumulate-allreduce-grads-in-fp32"], "--grad-reduce-in-bf16 overrides it, as in Megatron-LM",
         args.grad_reduce_in_bf16 and args.accumulate_allreduce_grads_in_fp32),
        (dynamic_flags, "--loss-scale gives a fixed scale", dynamic_flags and args.fp16 and args.loss_scale),
    ):
        if is_idle:
            yield NoEffect(names, reason)


def frozen_notes(args: Arguments, model: ModelConfig) -> Iterator[str]:
    """Settings of completely frozen parts, which have no effect; ``mm.weights.trained`` checks patterns."""
    for part, key in RATE_KEYS.items():
        settings, tower = getattr(model, part), key.rpartition(".")[0]
        if not settings.freeze or model.trainable_modules or args.trainable_modules:
            continue
        keys = [f"{tower}.freeze_layers"] if getattr(settings, "freeze_layers", "") else []
        keys += [f"{key}_{name}" for name in changed(settings.rates)]
        if part == "vision":  # a frozen ViT keeps no activations
            keys += [f"{tower}.recompute_{name}" for name in changed(settings.recompute)]
            keys += [f"{tower}.cpu_offloading_{name}" for name in changed(settings.offload) if settings.offload.is_on]
        if keys:
            yield NoEffect(keys, "freeze is true for that part", args.mm_model)
        flag = RATE_FLAGS.get(part)
        if flag is not None and getattr(args, flag) is not None:
            yield NoEffect([flag_name(flag)], "freeze is true in that part of the model JSON")


def sums_lists(args: Arguments, model: ModelConfig) -> bool:
    """Whether the pipeline lists of ``model`` do not count, as in MindSpeed-MM where FSDP2 is on one stage."""
    return args.shards_weights and args.pipeline_model_parallel_size == 1 and model.num_stages * model.num_chunks > 1


def overridden_notes(args: Arguments, model: ModelConfig) -> Iterator[str]:
    """Pipeline lists that flags override, and flags about activations that ``model``, the JSON's content, overrides."""
    if sums_lists(args, model):
        yield (f"{args.mm_model}: the pipeline_num_layers lists have {model.num_stages} stages, but weights are in "
               f"shards and --pipeline-model-parallel-size is 1: all layers are on one stage")
    for setting, flags in ACTIVATION_FLAGS.items():
        given = [flag_name(name) for name in flags if name in changed(args)]
        if given and all(changed(getattr(tower, setting)) for tower in (model.vision, model.language)):
            yield NoEffect(given, "the model JSON has such settings for both towers")


def sharding_notes(args: Arguments, num_copies: int) -> Iterator[str]:
    """Notes on what sharding cannot do.  ``num_copies``: ranks that hold the same weights."""
    if num_copies == 1 and args.shards_gradients:
        yield NoEffect(["--data-parallel-sharding-strategy"], "one rank holds each weight, so nothing is sharded")
    elif args.shards_weights:
        if args.save is not None:
            yield ("with weights in shards no rank holds the whole model, so if a rank fails, the others save nothing; "
                   "the run continues from its last checkpoint")
        if args.check_weights_interval is not None and args.tensor_model_parallel_size == 1:
            yield NoEffect(["--check-weights-interval"], "with weights in shards, no two ranks hold the same weights")


def loss_problems(args: Arguments, data: DataConfig) -> Iterator[str]:
    """With the mean over microbatches, a sample's weight depends on its microbatch, so that must not on the layout."""
    if args.loss_unit == "microbatch" and (why := _deals_by_layout(args, data)):
        yield (f"--calculate-per-microbatch-loss is given, but {why} in {args.mm_data} decides which samples share a "
               f"microbatch, so a sample's weight would depend on the number of ranks; use --calculate-per-sample-loss "
               f"or --calculate-per-token-loss")


def sampling_notes(args: Arguments, data: DataConfig) -> Iterator[str]:
    """Differences from MindSpeed-MM, and settings without effect."""
    if not (args.calculate_per_token_loss or args.calculate_per_sample_loss or args.calculate_per_microbatch_loss):
        why = _deals_by_layout(args, data)
        advice = f"with {why} that would depend on the number of ranks" if why else (
            "add --calculate-per-microbatch-loss for that, or --calculate-per-token-loss to confirm this")
        yield (f"loss: every target token of the global batch has the same weight.  MindSpeed-MM averages over each "
               f"microbatch, then over the microbatches: {advice}")
    if data.packs and data.truncation is None:
        yield (f"{args.mm_data}: packing fills each microbatch with whole samples, up to --seq-length x "
               f"--micro-batch-size = {args.seq_length * args.micro_batch_size} tokens; --global-batch-size counts "
               f"samples, not packs as in MindSpeed-MM.  Samples longer than --seq-length lose whole turns; set "
               f"\"truncation\" in basic_parameters to \"turns\" to confirm this, or to \"tokens\" to cut them as "
               f"MindSpeed-MM does without packing")
    if data.priority_mode != "data_bucketing_img" and data.sampler_type != "BucketBatchSampler":
        yield NoEffect(["priority_mode"], "it affects the BucketBatchSampler only", args.mm_data)


def _deals_by_layout(args: Arguments, data: DataConfig) -> str:
    """The setting that makes the samples of a microbatch depend on the layout; empty if there is none."""
    if data.packs:
        return "packing"
    return f"sampler_type {data.sampler_type!r}" if data.is_balanced and args.micro_batch_size > 1 else ""


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


def parallel_problems(run: "Run") -> Iterator[str]:
    """Numbers of ranks, stages, heads and samples that do not divide evenly."""
    yield from _context_problems(run)
    args, replica_size = run.args, run.tp_size * run.cp_size * run.num_stages
    if absent := [rank for rank in args.profile_ranks if args.profile and rank >= run.world_size]:
        yield (f"--profile-ranks has {', '.join(map(str, absent))}, but the world size is {run.world_size}; expected "
               f"ranks from 0 to {run.world_size - 1}")
    for key, count in run.model.counts_to_divide.items():
        if count % run.tp_size:
            yield (f"--tensor-model-parallel-size is {run.tp_size}, which does not divide {key} = {count} of "
                   f"{args.mm_model}; this model allows {', '.join(map(str, run.model.tp_sizes))}")
    if run.num_chunks > 1 and run.num_stages == 1:
        yield (f"{args.mm_model}: the pipeline_num_layers lists have {run.num_chunks} virtual chunks on one stage, "
               f"which cannot have any: give flat lists of one number each")
    if args.virtual_pipeline_model_parallel_size not in (None, run.num_chunks):
        yield (f"--virtual-pipeline-model-parallel-size is {args.virtual_pipeline_model_parallel_size}, but the "
               f"pipeline_num_layers lists of {args.mm_model} have another number of virtual chunks, {run.num_chunks}; "
               f"change one of the two (the flag is optional)")
    if args.pipeline_model_parallel_size not in (None, run.num_stages):
        yield (f"--pipeline-model-parallel-size is {args.pipeline_model_parallel_size}, but the pipeline_num_layers "
               f"lists of {args.mm_model} have {run.num_stages} stages; give lists of "
               f"{args.pipeline_model_parallel_size} numbers (mm-plan lists finds them), or leave the flag out")
    if args.shards_weights and run.num_stages > 1:
        yield (f"--data-parallel-sharding-strategy optim_grads_params needs one pipeline stage, but {args.mm_model} "
               f"has {run.num_stages}: passes of several microbatches alternate on a stage, and each would gather the "
               f"stage's weights again while other stages wait; give optim_grads, or lists of one number")
    if run.world_size % replica_size:
        wanted_stages = args.pipeline_model_parallel_size or run.num_stages
        if run.world_size % (replica_size // run.num_stages * wanted_stages) == 0:
            return  # it fits the flag; the lists, which contradict the flag, are reported above
        sizes = {"tensor": run.tp_size, "context": run.cp_size, "pipeline": run.num_stages}
        used = {name: size for name, size in sizes.items() if name != "context" or size > 1}
        yield (f"The world size is {run.world_size}, not a multiple of {' x '.join(used)} parallel size = "
               f"{' x '.join(map(str, used.values()))} = {replica_size}; nearest: "
               f"{_nearest_multiples(run.world_size, replica_size)} ranks")
    elif run.num_microbatches is None:
        unit = run.dp_size * run.microbatch_unit
        if run.num_chunks > 1 and run.global_batch_size % unit:
            yield (f"--global-batch-size is {run.global_batch_size}, not a multiple of data-parallel size x pipeline "
                   f"stages = {run.dp_size} x {run.num_stages} = {unit}, as packs on virtual chunks need; nearest: "
                   f"{_nearest_multiples(run.global_batch_size, unit)}")
        elif run.global_batch_size < unit:
            yield (f"--global-batch-size is {run.global_batch_size}; expected at least {unit} samples, so that each of "
                   f"{run.dp_size} replicas has one")
    elif run.global_batch_size % (unit := args.micro_batch_size * run.dp_size):
        yield (f"--global-batch-size is {run.global_batch_size}, not a multiple of --micro-batch-size x data-parallel "
               f"size = {args.micro_batch_size} x {run.dp_size} = {unit}; nearest: "
               f"{_nearest_multiples(run.global_batch_size, unit)}")
    elif run.num_chunks > 1 and run.num_microbatches < run.num_stages:
        yield (f"--global-batch-size is {run.global_batch_size}; microbatches of a replica: {run.num_microbatches}, "
               f"but virtual chunks need at least one for each of the {run.num_stages} stages; nearest: "
               f"{unit * run.num_stages}")


def _context_problems(run: "Run") -> Iterator[str]:
    """Ulysses distributes the heads of a tensor-parallel rank over the context-parallel ranks."""
    language, tp_size = run.model.language, run.tp_size
    if run.is_ring or run.cp_size == 1 or tp_size not in run.model.tp_sizes:
        return
    num_heads, num_groups = language.num_attention_heads // tp_size, language.num_query_groups // tp_size
    legal = [size for size in range(1, num_heads + 1)
             if num_heads % size == 0 and (num_groups % size == 0 or size % num_groups == 0)]
    if run.cp_size not in legal:
        yield (f"--context-parallel-size is {run.cp_size}, but with ulysses_cp_algo it must divide the {num_heads} "
               f"heads per tensor-parallel rank of {run.args.mm_model} (and divide or be a multiple of the "
               f"{num_groups} key groups): {', '.join(map(str, legal))}; "
               f"--context-parallel-algo megatron_cp_algo allows any size")


def _nearest_multiples(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
