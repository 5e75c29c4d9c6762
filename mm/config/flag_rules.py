"""Rules between flags of a training, as problems for the user; those of single flags are in ``mm.config.flags``."""

from collections.abc import Iterator

from mm.config.activations import recompute_problems
from mm.config.command_line import Words
from mm.config.flags import Arguments
from mm.config.lora import pattern_problems
from mm.config.phases import phase_problems


def flag_problems(args: Arguments) -> Iterator[str]:
    """Rules between flags."""
    if args.bf16 and args.fp16:
        yield "--bf16 and --fp16 are both given; keep one"
    if args.overlap_p2p_communication and args.no_overlap_p2p_communication:
        yield "--overlap-p2p-communication and --no-overlap-p2p-communication are both given; keep one"
    if args.grad_reduce_in_bf16 and not args.bf16:
        yield (f"--grad-reduce-in-bf16 needs --bf16, but the run is in {args.precision}: gradients are fp32, or of the "
               f"weights' dtype; add --bf16, or remove the flag")
    copies = {"--main-params-dtype bf16": args.main_params_dtype == "bf16",
              "--store-param-remainders": args.store_param_remainders}  # fmt: skip
    for flag, is_given in copies.items():
        if is_given and not args.bf16:
            yield (f"{flag} needs --bf16, but the run is in {args.precision}: it replaces the fp32 copies of bf16 "
                   f"weights; add --bf16, or remove the flag")
    if all(copies.values()):
        yield (f"{' and '.join(copies)} are both given; keep the second for exact updates, or the first to save 2 more "
               f"bytes per trained weight")
    if args.optimizer_offload_fraction != 1.0 and not args.optimizer_cpu_offload:
        yield (f"--optimizer-offload-fraction is {args.optimizer_offload_fraction:g}, but --optimizer-cpu-offload is "
               f"missing; add it, or remove the fraction")
    losses = [f"--calculate-per-{unit}-loss" for unit in ("token", "sample", "microbatch")
              if getattr(args, f"calculate_per_{unit}_loss")]
    if len(losses) > 1:
        yield f"{' and '.join(losses)} are all given; keep one"
    if args.overlap_param_gather and not (args.splits_optimizer and args.overlap_grad_reduce):
        yield ("--overlap-param-gather needs --overlap-grad-reduce and split optimizer state: "
               "--use-distributed-optimizer, or --data-parallel-sharding-strategy optim, optim_grads or "
               "optim_grads_params")
    if args.use_distributed_optimizer and not args.splits_optimizer:
        yield ("--use-distributed-optimizer and --data-parallel-sharding-strategy no_shard contradict each other: the "
               "first splits optimizer state over the data-parallel ranks; remove it, or write optim for no_shard")
    for flag, value in (("--keep-last-checkpoints", args.keep_last_checkpoints),
                        ("--save-retain-interval", args.save_retain_interval)):
        if args.save is None and value is not None:
            yield f"{flag} is {value}, but --save is missing"
    if args.save_on_each_node and args.save is None:
        yield "--save-on-each-node is given, but --save is missing"
    if args.save_retain_interval is not None and args.save_retain_interval % (args.save_interval or 1):
        yield (f"--save-retain-interval is {args.save_retain_interval}; expected a multiple of --save-interval = "
               f"{args.save_interval}, because no other iterations are saved at intervals")
    yield from phase_problems(args.phase_timeouts)
    yield from recompute_problems(args.recompute, "--recompute-", "--recompute-num-layers")
    yield from pattern_problems("--lora-rank-pattern", args.lora_rank_pattern, whole=True)
    yield from pattern_problems("--lora-alpha-pattern", args.lora_alpha_pattern, whole=False)
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        yield "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler are both given; keep one"
    if args.min_lr > args.lr:
        yield f"--min-lr is {args.min_lr:g}, above --lr = {args.lr:g}"
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        yield "--lr-warmup-fraction and --lr-warmup-iters are both given; keep one"
    if args.profile and args.profile_step_start >= args.profile_step_end:
        yield (f"--profile-step-start is {args.profile_step_start}; expected less than --profile-step-end = "
               f"{args.profile_step_end}, before which the profiler stops")
    if args.train_iters:
        yield from step_problems(args)


def step_problems(args: Arguments) -> Iterator[str]:
    """Rules between flags and the number of steps, which with ``--num-train-epochs`` follows from the samples."""
    if args.lr_warmup_iters >= (decay_iters := args.lr_decay_iters or args.train_iters):
        yield (f"--lr-warmup-iters is {args.lr_warmup_iters}; expected fewer than the {decay_iters} decay steps "
               f"({'--lr-decay-iters' if args.lr_decay_iters else '--train-iters'})")
    if args.profile_pipeline is not None and args.profile_pipeline > args.train_iters:
        yield (f"--profile-pipeline is {args.profile_pipeline}, but the last iteration is --train-iters = "
               f"{args.train_iters}; give one from 1 to {args.train_iters}")
    if args.profile and args.profile_step_start > args.train_iters:
        yield (f"--profile-step-start is {args.profile_step_start}, but the last iteration is --train-iters = "
               f"{args.train_iters}; give one from 1 to {args.train_iters}")


def length_problems(words: Words) -> Iterator[str]:
    """Problems if the length of the run is missing, or given twice."""
    given = [flag for flag in ("--train-iters", "--num-train-epochs") if flag in words.given]
    if len(given) > 1:
        yield f"{' and '.join(given)} both give the length of the run; keep one"
    if not given:
        yield "--train-iters is missing: total number of optimizer steps; or give --num-train-epochs"
