"""Every rule between the command line, the model JSON and the world size.  Pure: reads no file and no environment.

Rules inside one file are checked where that file is read (``mm.config.model``).
"""

import math

from mm.config.flags import Arguments
from mm.config.model import DataConfig, ModelConfig, ModelFile, RecomputeConfig, recompute_problems
from mm.placement import layout_problems


def problems(args: Arguments, model: ModelConfig, data: DataConfig, world_size: int) -> list[str]:
    """Everything that does not fit together, each as a full sentence; empty when the run can start."""
    return [
        *flag_problems(args),
        *_pipeline_problems(args, model),
        *_tensor_parallel_problems(args, model),
        *_size_problems(args, model, world_size),
        *_data_problems(args, model, data),
    ]


def precision(args: Arguments) -> str:
    """"fp32", "bf16" or "fp16", as the flags say."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def claim_problems(args: Arguments, model: ModelFile) -> list[str]:
    """Where the dtype keys of the model JSON contradict the flags."""
    chosen = precision(args)
    flag = "Neither --bf16 nor --fp16 is given" if chosen == "fp32" else f"--{chosen} is given"
    contrary = [f"{claim.where} is {claim.value}" for claim in model.claims
                if claim.is_on != (claim.precision == chosen)]
    return [f"{flag}, which means {chosen}, but {', '.join(contrary)}; change the flag or the file"] if contrary else []


def flag_problems(args: Arguments) -> list[str]:
    """Rules between flags alone."""
    decay_iters = args.lr_decay_iters or args.train_iters
    rules = (
        (not (args.bf16 and args.fp16), "--bf16 and --fp16 are both given; keep one"),
        (not (args.calculate_per_token_loss and args.calculate_per_sample_loss),
         "--calculate-per-token-loss and --calculate-per-sample-loss are both given; keep one"),
        (args.min_lr <= args.lr, f"--min-lr is {args.min_lr:g}, above --lr = {args.lr:g}"),
        (args.lr_warmup_fraction is None or args.lr_warmup_iters == 0,
         "--lr-warmup-fraction and --lr-warmup-iters are both given; keep one"),
        (args.lr_warmup_fraction is None or args.lr_warmup_fraction < 1,
         f"--lr-warmup-fraction is {args.lr_warmup_fraction}; expected at least 0 and less than 1"),
        (args.lr_warmup_iters == 0 or args.lr_warmup_iters < decay_iters,
         f"--lr-warmup-iters is {args.lr_warmup_iters}; expected fewer than the {decay_iters} decay steps "
         f"({'--lr-decay-iters' if args.lr_decay_iters else '--train-iters'})"),
        (args.adam_beta1 < 1 and args.adam_beta2 < 1,
         f"--adam-beta1 is {args.adam_beta1:g} and --adam-beta2 is {args.adam_beta2:g}; expected both below 1"),
        (args.adam_eps > 0,
         f"--adam-eps is {args.adam_eps:g}, by which a weight without gradient is divided; expected more than 0, for "
         f"example 1e-8"),
        (args.save is not None or args.save_interval is None,
         f"--save-interval is {args.save_interval}, but --save is missing: give the directory of the checkpoints"),
        (args.save is not None or args.keep_last_checkpoints is None,
         f"--keep-last-checkpoints is {args.keep_last_checkpoints}, but --save is missing"),
        (not args.overlap_param_gather or (args.use_distributed_optimizer and args.overlap_grad_reduce),
         "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce"),
        (not args.sequence_parallel or args.tensor_model_parallel_size == 1,
         "--sequence-parallel is not in this version; leave it out: what is trained is the same, and norms and "
         "residuals are held whole on every tensor-parallel rank"),
        (args.context_parallel_size == 1,
         f"--context-parallel-size is {args.context_parallel_size}; this version supports 1"),
        (args.virtual_pipeline_model_parallel_size in (None, 1),
         f"--virtual-pipeline-model-parallel-size is {args.virtual_pipeline_model_parallel_size}; this version's "
         f"engine runs one chunk per stage"),
    )
    found = [problem for is_kept, problem in rules if not is_kept]
    return found + recompute_problems(recompute_flags(args), "--recompute-")


def recompute_flags(args: Arguments) -> RecomputeConfig:
    """The three recompute flags as one setting."""
    return RecomputeConfig(args.recompute_granularity, args.recompute_method, args.recompute_num_layers)


def _pipeline_problems(args: Arguments, model: ModelConfig) -> list[str]:
    vision, language = model.vision, model.language
    found = layout_problems(vision.pipeline_num_layers, language.pipeline_num_layers,
                            vision.num_layers, language.num_layers)
    if found:
        return [f"{args.mm_model}: {problem}" for problem in found]
    if model.num_chunks != 1:
        found.append(f"{args.mm_model}: the pipeline_num_layers lists have {model.num_chunks} virtual chunks per "
                     f"stage; this version's engine runs one: give flat lists of {model.num_stages} numbers")
    if args.pipeline_model_parallel_size not in (None, model.num_stages):
        found.append(f"--pipeline-model-parallel-size is {args.pipeline_model_parallel_size}, but the "
                     f"pipeline_num_layers lists of {args.mm_model} have {model.num_stages} stages; change one of the "
                     f"two (the flag may be left out)")
    return found


def _tensor_parallel_problems(args: Arguments, model: ModelConfig) -> list[str]:
    tp_size = args.tensor_model_parallel_size
    counts = {
        "text_decoder.num_attention_heads": model.language.num_attention_heads,
        "text_decoder.num_query_groups": model.language.num_query_groups,
        "text_decoder.vocab_size": model.language.vocab_size,
        "image_encoder.vision_encoder.num_attention_heads": model.vision.num_attention_heads,
    }
    common = math.gcd(*counts.values())
    legal = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
    return [
        f"--tensor-model-parallel-size is {tp_size}, which does not divide {key} = {count} of {args.mm_model}; this "
        f"model allows {legal}"
        for key, count in counts.items()
        if count % tp_size
    ]


def _size_problems(args: Arguments, model: ModelConfig, world_size: int) -> list[str]:
    num_stages = model.num_stages
    if not num_stages:
        return []  # the empty list is told by layout_problems
    replica_size = args.tensor_model_parallel_size * num_stages
    if world_size % replica_size:
        return [f"The world size is {world_size}, not a multiple of tensor x pipeline parallel size = "
                f"{args.tensor_model_parallel_size} x {num_stages} = {replica_size}; nearest: "
                f"{_nearest_multiples(world_size, replica_size)} ranks"]
    dp_size = world_size // replica_size
    unit = args.micro_batch_size * dp_size
    if args.global_batch_size is not None and args.global_batch_size % unit:
        return [f"--global-batch-size is {args.global_batch_size}, not a multiple of --micro-batch-size x "
                f"data-parallel size = {args.micro_batch_size} x {dp_size} = {unit}; nearest: "
                f"{_nearest_multiples(args.global_batch_size, unit)}"]
    return []


def _nearest_multiples(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _data_problems(args: Arguments, model: ModelConfig, data: DataConfig) -> list[str]:
    limit = model.language.max_position_embeddings
    rules = (
        (args.seq_length <= limit,
         f"--seq-length is {args.seq_length}; expected at most text_decoder.max_position_embeddings = {limit} of "
         f"{args.mm_model}"),
        (data.image_min_pixels <= data.image_max_pixels,
         f"{args.mm_data}: image_min_pixels is {data.image_min_pixels}, above image_max_pixels = "
         f"{data.image_max_pixels}"),
        (not (data.train_on_prompt and data.mask_history),
         f"{args.mm_data}: train_on_prompt and mask_history are both true; they exclude each other, so set one to "
         f"false"),
        (max(model.image_token_id, model.vision_start_token_id) < model.language.vocab_size,
         f"{args.mm_model}: img_context_token_id is {model.image_token_id} and vision_start_token_id is "
         f"{model.vision_start_token_id}; expected both below vocab_size = {model.language.vocab_size}"),
    )
    return [problem for is_kept, problem in rules if not is_kept]
