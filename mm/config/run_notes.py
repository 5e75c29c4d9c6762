"""Notes on settings of a run that have no effect, and on important ones that are absent."""

from collections.abc import Iterator

from mm.config.activations import offload_notes, recompute_notes
from mm.config.command_line import flag_name
from mm.config.flags import Arguments
from mm.config.model import ModelConfig
from mm.config.notes import NoEffect
from mm.config.schema import changed

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
_DYNAMIC_SCALE_FLAGS = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_PROFILE_FLAGS = ("profile_step_start", "profile_step_end", "profile_ranks", "profile_save_path")


def frozen_notes(args: Arguments, model: ModelConfig) -> Iterator[str]:
    """Settings of completely frozen parts, which have no effect; ``mm.weights.trained`` checks patterns."""
    for part, key in RATE_KEYS.items():
        if not getattr(model, part).freeze or model.trainable_modules or args.trainable_modules:
            continue
        tower = key.rpartition(".")[0]
        if getattr(getattr(model, part), "freeze_layers", ""):
            yield NoEffect([f"{tower}.freeze_layers"], "freeze is true for the whole part", args.mm_model)
        rates, flag = getattr(model, part).rates, RATE_FLAGS.get(part)
        if flag is not None and getattr(args, flag) is not None:
            yield NoEffect([flag_name(flag)], "freeze is true in that part of the model JSON")
        for name in ("lr", "weight_decay"):
            if getattr(rates, name) is not None:
                yield NoEffect([f"{key}_{name}"], "freeze is true for that part", args.mm_model)
        if part == "vision":
            keys = [f"{tower}.recompute_{name}" for name in changed(model.vision.recompute)]
            if model.vision.offload.is_on:
                keys += [f"{tower}.cpu_offloading_{name}" for name in changed(model.vision.offload)]
            if keys:
                yield NoEffect(keys, "freeze is true, and a frozen ViT keeps no activations", args.mm_model)


def sums_lists(args: Arguments, model: ModelConfig) -> bool:
    """Whether the pipeline lists of ``model`` do not count, as in MindSpeed-MM where FSDP2 is on one stage."""
    return args.shards_weights and args.pipeline_model_parallel_size == 1 and model.num_stages * model.num_chunks > 1


def overridden_notes(args: Arguments, model: ModelConfig) -> Iterator[str]:
    """Pipeline lists that flags override, and flags about activations that change nothing in ``model``, the content of
    its JSON."""
    if sums_lists(args, model):
        yield (f"{args.mm_model}: the pipeline_num_layers lists have {model.num_stages} stages, but weights are in "
               f"shards and --pipeline-model-parallel-size is 1: all layers are on one stage")
    for setting, flags in ACTIVATION_FLAGS.items():
        given = [flag_name(name) for name in flags if name in changed(args)]
        if given and all(changed(getattr(tower, setting)) for tower in (model.vision, model.language)):
            yield NoEffect(given, "the model JSON has such settings for both towers")


def flag_notes(args: Arguments) -> Iterator[str]:
    """Settings that have no effect, and important settings that are absent."""
    if (args.load, args.load_base_model, args.pretrained_checkpoint) == (None, None, None):
        yield "--load is absent: training starts from random weights"
    if args.save is None:
        interval = f", despite --save-interval {args.save_interval}" if args.save_interval else ""
        yield f"--save is absent: no checkpoint will be written{interval}"
    yield from recompute_notes(args.recompute, "--recompute-", "--recompute-num-layers")
    yield from offload_notes(args.offload, "--cpu-offload-activations", "--cpu-offloading-num-layers")
    profile_flags, dynamic_flags, scale_flags = (
        [flag_name(name) for name in names if name in changed(args)]
        for names in (_PROFILE_FLAGS, _DYNAMIC_SCALE_FLAGS, ("loss_scale", *_DYNAMIC_SCALE_FLAGS)))
    for names, reason, is_idle in (
        (["--sequence-parallel"], "there is one tensor-parallel rank",
         args.sequence_parallel and args.tensor_model_parallel_size == 1),
        (["--pretrained-checkpoint"], f"--load is {args.load}, which is not the directory of --save",
         args.pretrained_checkpoint is not None and not args.may_begin),
        (["--vision-feature-cache-gib"], "it needs --vision-feature-cache",
         args.vision_feature_cache_gib is not None and args.vision_feature_cache is None),
        (["--lr-scale-modules"], "it needs --lr-mult", args.lr_scale_modules and args.lr_mult == 1.0),
        (["--lr-mult"], "it needs --lr-scale-modules", args.lr_mult != 1.0 and not args.lr_scale_modules),
        (profile_flags, "they need --profile", profile_flags and not args.profile),
        (["--accumulate-allreduce-grads-in-fp32"], "--grad-reduce-in-bf16 overrides it, as in Megatron-LM",
         args.grad_reduce_in_bf16 and args.accumulate_allreduce_grads_in_fp32),
        (scale_flags, "they need --fp16", scale_flags and not args.fp16),
        (dynamic_flags, "--loss-scale gives a fixed scale", dynamic_flags and args.fp16 and args.loss_scale),
        (["--max-bad-fraction"], "it needs --bad-sample skip",
         "max_bad_fraction" in changed(args) and args.bad_sample == "error"),
    ):
        if is_idle:
            yield NoEffect(names, reason)


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
