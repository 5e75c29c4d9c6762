"""The command line as a frozen dataclass, with Megatron's names and, unless the help says otherwise, its defaults.

Each field of ``Arguments`` is one flag (``lr_decay_style`` is ``--lr-decay-style``), with type, bound, default and
help.  Flags of other programs that do nothing here are in ``mm.config.mindspeed``, rules between flags in
``mm.config.rules``.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.command_line import CommandLine
from mm.config.layers import Granularity, Method, OffloadConfig, RecomputeConfig, RecomputeModules
from mm.config.lora import ALPHAS_TEXT, Alpha, Alphas, LoraConfig, Ranks
from mm.config.mindspeed import FLAGS
from mm.config.parse import (
    FIRST,
    LOCAL,
    STRICT,
    Count,
    Excludes,
    Fraction,
    Group,
    Idle,
    NaturalNumber,
    Needs,
    NotNegative,
    Number,
    Numbers,
    PathOrNone,
    PathText,
    Patterns,
    Positive,
    Seed,
)
from mm.families import TITLES
from mm.files import is_same_directory

DeviceName = Literal["auto", "npu", "cuda", "cpu"]
LossUnit = Literal["token", "sample", "microbatch"]
BenchmarkName = Literal["ai2d", "chartqa", "docvqa", "mmmu"]
Rule = Literal["choice", "exact", "anls", "relaxed"]
"""How an answer is scored; ``mm.scoring.rules`` describes each rule."""
KeptCopy = Literal["fp32", "remainder", "none"]
"""What the optimizer keeps beside a 16-bit weight: an fp32 copy, the 16 bits that bf16 lacks of it, or nothing."""
Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
"""What the ranks with the same weights divide among themselves; each value includes the ones before it."""
VitQkvOrder = Literal["per_head", "whole"]
"""per_head: what MindSpeed-MM's runtime reads; whole: [Q; K; V], as its converters 2.2.0 and 2.3.0 write it."""

DEFAULT_SEED = 1234
"""Megatron's.  Programs that inspect the data of a run use it too, because it determines which samples are drawn."""

PHASE_SECONDS: Mapping[str, float] = {
    "check": 6 * 3600.0, "start": 1800.0, "load": 3600.0, "data": 6 * 3600.0, "answers": 3600.0, "save": 3600.0,
    "export": 3 * 3600.0, "between": 600.0,
}
"""Phase -> seconds after which it counts as a hang; a step has ``--step-timeout``.  ``check`` and ``data`` build the
index of the samples where there is none: 450 s for a million samples on two cores.  ``answers`` is one batch;
``export`` writes the whole model from one process; ``between`` is the time between two phases or steps, and at the
end."""


class HasPrecision:
    """Flags with a precision; neither of the two is fp32."""

    bf16: bool
    fp16: bool

    @property
    def precision(self) -> str:
        """"fp32", "bf16" or "fp16"."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Arguments(HasPrecision):
    """Everything on the command line.  Counts are per optimizer step unless named otherwise."""

    mm_model: Annotated[PathText, Group("Files")] = Field(description="model JSON")
    mm_data: PathText = Field(description="data JSON")
    load: Annotated[PathOrNone, FIRST] = Field(
        None, description="weights or checkpoint to start from; absent = random weights")
    pretrained_checkpoint: PathOrNone = Field(None, description=(
        "weights or checkpoint to start from if --load is absent, or is --save without a checkpoint yet; its optimizer "
        "and random states are not loaded"))
    vit_qkv_order: VitQkvOrder | None = Field(
        None, description="order of the ViT's qkv in --load of MindSpeed-MM; absent = from model_name_or_path")
    save: Annotated[PathOrNone, FIRST] = Field(None, description="directory of the training checkpoints")
    export_hf: Annotated[PathOrNone, FIRST] = Field(
        None, description="directory of the Hugging Face export at the end; for adapters, a PEFT directory")
    export_merged_hf: PathOrNone = Field(
        None, description="directory of the Hugging Face export at the end, with the adapters merged")
    log_dir: PathText = Field("logs", description="directory of the resolved configuration and the metrics")
    tensorboard_dir: PathOrNone = Field(None, description="directory of TensorBoard events")

    vision_feature_cache: PathOrNone = Field(None, description=(
        "directory that caches the outputs of a fully frozen ViT per image and video, for later epochs and runs"))
    vision_feature_cache_gib: Annotated[Positive | None, LOCAL, Idle("vision_feature_cache")] = Field(
        None, description="largest size of that cache in GiB; absent = until the disk is full")

    device: Annotated[DeviceName, Group("Machines")] = Field("auto", description="what to run on")
    world_size: Annotated[Count | None, LOCAL] = Field(
        None, description="ranks for --dry-run and --check; a launcher sets WORLD_SIZE instead")
    tensor_model_parallel_size: Count = Field(1, description="tensor-parallel ranks")
    pipeline_model_parallel_size: Count | None = Field(
        None, description="pipeline stages; must equal the length of the pipeline lists; absent = that length")
    virtual_pipeline_model_parallel_size: Count | None = Field(
        None, description="chunks of each stage; must equal the number of pipeline lists; absent = that number")
    sequence_parallel: bool = Field(
        False, description="split norms and residuals along the tokens over the tensor-parallel ranks")
    context_parallel_size: Count = Field(1, description="ranks that split the tokens and images of a microbatch")
    context_parallel_algo: Literal["ulysses_cp_algo", "megatron_cp_algo"] = Field("ulysses_cp_algo", description=(
        "exchange heads for tokens (ulysses_cp_algo), or send keys and values around a ring (megatron_cp_algo)"))
    distributed_timeout_minutes: Count = Field(10, description="time limit of one collective")
    step_timeout: NotNegative | None = Field(None, description=(
        "seconds after which a step counts as stalled, at least 1800 for the first; absent = 300, or 10 x the median "
        "step; 0 = never"))
    phase_timeouts: Patterns = Field((), description=(
        "NAME=SECONDS pairs: time limits of the phases check, start, load, data, answers, save, export and between; "
        "0 = no limit"))
    overlap_p2p_communication: bool = Field(False, description=(
        "receive the next message between stages during computation; the default on NPU and CPU"))
    no_overlap_p2p_communication: Annotated[bool, Excludes("overlap_p2p_communication")] = Field(False, description=(
        "receive a message between stages only when it is needed; the default on CUDA, where a pending message takes "
        "processors away from the computation"))

    micro_batch_size: Annotated[Count, Group("Batches and steps")] = Field(description="samples per microbatch")
    global_batch_size: Annotated[Count | None, FIRST] = Field(
        None, description="samples per step over all ranks; absent = micro batch size x data-parallel size")
    seq_length: Count = Field(description="longest sample in tokens")
    train_iters: Annotated[NaturalNumber, FIRST] = Field(0, title="an integer of at least 1", description=(
        "total number of optimizer steps; 0 = determined by --num-train-epochs"))
    num_train_epochs: Annotated[Positive | None, Excludes("train_iters")] = Field(None, description=(
        "passes over the training samples, such as 3 or 0.5, instead of --train-iters; the last step is a full batch"))
    exit_interval: Count | None = Field(None, description="stop after a step that is a multiple of this")
    exit_duration_in_mins: Positive | None = Field(None, description=(
        "save and stop after the first step that ends this many minutes after the start, with exit status 0"))
    seed: Seed = Field(DEFAULT_SEED, description="seed of weights and shuffling")
    deterministic_mode: bool = Field(False, description="bitwise reproducible on accelerators too; slower")
    num_workers: Annotated[NaturalNumber, LOCAL] = Field(2, description="data worker processes per model replica")
    bad_sample: Literal["error", "skip"] = Field(
        "error", description="stop at a sample that cannot be used, or leave it out and list it in --log-dir")
    max_bad_fraction: Annotated[Fraction, Idle("bad_sample", "skip")] = Field(
        0.1, description="fraction of samples that may be left out before the run stops")
    check_weights_interval: Count | None = Field(None, description=(
        "steps between comparisons of the weights that several ranks hold, which also precede each save; absent = "
        "never"))
    skip_bad_steps: Count | None = Field(None, description=(
        "bad steps in a row that are skipped, with no weight changed: the loss or a gradient is not finite, or the "
        "gradient norm is a spike; absent = a loss or gradient that is not finite ends the run"))
    spike_factor: Positive = Field(10.0, description=(
        "a loss or gradient norm above this many times its median over the latest 100 steps is a spike, which is "
        "recorded with the step's samples"))
    calculate_per_token_loss: bool = Field(False, description="mean over the target tokens of a global batch (default)")
    calculate_per_sample_loss: Annotated[bool, Excludes("calculate_per_token_loss")] = Field(
        False, description="mean over the samples of each sample's mean")
    calculate_per_microbatch_loss: Annotated[
        bool, Excludes("calculate_per_token_loss"), Excludes("calculate_per_sample_loss")] = Field(
        False, description="mean over microbatches of each microbatch's mean: MindSpeed-MM's default")

    eval_interval: Annotated[Count, Group("Validation: of val_dataset or val_rate in the data JSON")] = Field(
        1000, description="steps between validations; the last step is always validated")
    eval_iters: NaturalNumber | None = Field(
        None, description="maximum global batches per validation; absent = every sample once; 0 = no validation")
    save_best: Annotated[bool, Needs("save")] = Field(
        False, description="keep the checkpoint with the lowest validation loss, in the folder best of --save")
    early_stopping_patience: Count | None = Field(
        None, description="stop after this many validations in a row without a new lowest loss; absent = never")
    eval_generate_interval: Annotated[Count | None, Needs("eval_generate_questions")] = Field(None, description=(
        "steps between scorings of the model's answers; the last step is always scored; absent = no scoring"))
    eval_generate_questions: Annotated[PathOrNone, Needs("eval_generate_interval")] = Field(None, description=(
        "questions to answer: OpenCompass's TSV file of a benchmark, or your own JSON, JSONL or Parquet file"))
    eval_generate_rule: Annotated[Rule | None, Needs("eval_generate_interval")] = Field(
        None, description="scoring rule for your own questions")
    eval_generate_benchmark: Annotated[
        BenchmarkName | None, Needs("eval_generate_interval"), Excludes("eval_generate_rule")] = Field(
        None, description="benchmark that the questions are from")
    eval_generate_max_questions: Annotated[Count | None, Needs("eval_generate_interval")] = Field(
        None, description="ask only this many, from the start of the file; absent = all")
    eval_generate_max_new_tokens: Annotated[Count | None, Needs("eval_generate_interval")] = Field(
        None, description="maximum tokens of an answer; absent = as in mm.evaluate")

    freeze_modules: Annotated[Patterns, Group("What is trained")] = Field((), description=(
        "words; weights whose names contain one of them are not trained, as if their part were frozen"))
    trainable_modules: Patterns = Field((), description=(
        "words; weights whose names contain one of them are trained even if other settings freeze them"))
    lora_target_modules: Patterns = Field((), description=(
        "linear layers that get adapters (LoRA), by MindSpeed-MM's or Hugging Face's names, such as q_proj v_proj, or "
        "all-linear; the rest of the model is frozen"))
    lora_r: Count = Field(LoraConfig.r, description="rank of the adapters")
    lora_alpha: Alpha = Field(LoraConfig.alpha, title=ALPHAS_TEXT, description="adapters are scaled by this / rank")
    lora_dropout: Fraction = Field(
        LoraConfig.dropout, description="dropout probability on an adapter's input")
    lora_use_rslora: bool = Field(False, description="scale adapters by alpha / square root of the rank")
    lora_rank_pattern: Ranks = Field(
        (), title="patterns, each with = and an integer of at least 1, such as q_proj=4",
        description="different ranks for some adapters, such as q_proj=4")
    lora_alpha_pattern: Alphas = Field(
        (), title=f"patterns, each with = and {ALPHAS_TEXT}, such as q_proj=8",
        description="different alphas for some adapters, such as q_proj=8")
    load_base_model: PathOrNone = Field(None, description=(
        "base model of the adapters in --load; also what a run without --pretrained-checkpoint starts from if its "
        "--load is its --save and holds no checkpoint yet; absent = model_name_or_path"))

    lr: Annotated[NotNegative, Group("Optimizer (Adam)")] = Field(description="highest learning rate")
    min_lr: NotNegative = Field(0.0, description="lowest learning rate")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = Field(
        "linear", description="shape of the decay")
    lr_decay_iters: Count | None = Field(None, description="step that reaches the lowest rate; absent = --train-iters")
    lr_warmup_iters: NaturalNumber = Field(0, description="steps of linear warm-up")
    lr_warmup_fraction: Annotated[Fraction | None, Excludes("lr_warmup_iters")] = Field(
        None, description="warm-up as a fraction of the decay steps")
    lr_warmup_init: NotNegative = Field(0.0, description="learning rate at the start of the warm-up")
    weight_decay: NotNegative = Field(0.01, description="decoupled weight decay")
    adam_beta1: Fraction = Field(0.9, description="decay of the first moment")
    adam_beta2: Fraction = Field(0.999, description="decay of the second moment")
    vision_tower_lr: Positive | None = Field(None, description="highest learning rate of the ViT; absent = --lr")
    mm_projector_lr: Positive | None = Field(None, description="highest learning rate of the projector; absent = --lr")
    lr_scale_modules: Annotated[Patterns, Idle("lr_mult")] = Field((), description=(
        "words; weights whose names contain one of them have their learning rate multiplied by --lr-mult"))
    lr_mult: Annotated[Positive, Idle("lr_scale_modules")] = Field(
        1.0, description="factor on the learning rates of the weights in --lr-scale-modules")
    weight_decay_exclude_modules: Patterns = Field((), description=(
        "words; weights whose names contain one of them have no weight decay; norms and biases never have any"))
    adam_eps: Positive = Field(1e-8, description="added to the denominator")
    clip_grad: NotNegative = Field(1.0, description="clip gradients to this global norm; 0 = no clipping")
    use_distributed_optimizer: bool = Field(False, description="split optimizer state over the data-parallel ranks")
    data_parallel_sharding_strategy: Sharding | None = Field(None, description=(
        "what the ranks with the same weights split: nothing (no_shard), optimizer state (optim), gradients too "
        "(optim_grads), or weights too (optim_grads_params); absent = as --use-distributed-optimizer says"))
    exp_avg_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="dtype of Adam's first moment between steps; bf16 halves its memory")
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = Field("fp32", description=(
        "dtype of Adam's second moment between steps; bf16 halves its memory, with stochastic rounding"))
    main_params_dtype: Annotated[Literal["fp32", "bf16"], Needs("bf16")] = Field("fp32", description=(
        "dtype of the weights that Adam updates; bf16: the bf16 weights themselves, with stochastic rounding, without "
        "fp32 copies"))
    store_param_remainders: Annotated[bool, Needs("bf16"), Excludes("main_params_dtype")] = Field(False, description=(
        "keep beside each bf16 weight the 16 bits that it lacks, not an fp32 copy: the same updates, half the memory"))
    optimizer_cpu_offload: bool = Field(False, description=(
        "keep optimizer states in host memory; they pass through the device in each update, to the same numbers"))
    optimizer_offload_fraction: Annotated[NotNegative, Le(1), Needs("optimizer_cpu_offload")] = Field(
        1.0, description="share of the optimizer states that --optimizer-cpu-offload keeps in host memory")
    accumulate_allreduce_grads_in_fp32: bool = Field(
        False, description="sum and reduce gradients in fp32 (default); --grad-reduce-in-bf16 switches it off")
    grad_reduce_in_bf16: Annotated[bool, Needs("bf16")] = Field(
        False, description="sum gradients in bf16 over microbatches and ranks: half the memory and half the traffic")
    overlap_grad_reduce: bool = Field(False, description="reduce gradients during the backward pass")
    overlap_param_gather: Annotated[bool, Needs("overlap_grad_reduce")] = Field(
        False, description="gather parameters during the forward pass")

    bf16: Annotated[bool, Group("Precision")] = Field(
        False, description="compute in bfloat16; neither --bf16 nor --fp16 = fp32")
    fp16: Annotated[bool, Excludes("bf16")] = Field(False, description="compute in float16 with loss scaling")
    loss_scale: Annotated[NotNegative | None, Idle("fp16")] = Field(
        None, description="fixed loss scale; absent = dynamic")
    initial_loss_scale: Annotated[Number, Ge(1), Idle("fp16")] = Field(
        float(2**32), description="first dynamic loss scale")
    min_loss_scale: Annotated[NotNegative, Idle("fp16")] = Field(1.0, description="lowest dynamic loss scale")
    loss_scale_window: Annotated[Count, Idle("fp16")] = Field(
        1000, description="steps without overflow before the scale is doubled")
    hysteresis: Annotated[Count, Idle("fp16")] = Field(2, description="overflows before the scale is halved")

    recompute_granularity: Annotated[Granularity | None, Group("Memory")] = Field(None, description=(
        "recompute in towers without it in the JSON: whole layers (full), or modules of each (selective)"))
    recompute_method: Method | None = Field(None, description="which layers of a stage to recompute")
    recompute_num_layers: Count | None = Field(None, description=(
        "how many layers to recompute, the first of each stage or chunk (block); no effect with uniform"))
    recompute_modules: RecomputeModules = Field((), description=(
        "what selective recomputes: outputs of norms (layernorm), of SwiGLU (mlp_act), or whole MLPs (mlp); absent = "
        "layernorm mlp_act"))
    cpu_offload_activations: bool = Field(False, description=(
        "keep a layer's activations in host memory until its backward pass, in towers whose JSON has no such setting"))
    cpu_offloading_num_layers: NaturalNumber | None = Field(None, description=(
        "offload activations of this many layers, the first of each stage or chunk; alone it switches offload on; "
        "absent = all with --cpu-offload-activations, else none"))

    finetune: Annotated[bool, LOCAL, Group("Checkpoints")] = Field(
        False, description="load weights only and start at step 0")
    allow_new_data: bool = Field(False, description=(
        "continue with data that differ from the checkpoint's, from the first sample; no effect on unchanged data"))
    no_load_optim: Annotated[bool, LOCAL] = Field(False, description=(
        "do not load optimizer state; the learning rate schedule restarts"))
    use_checkpoint_opt_param_scheduler: bool = Field(False, description=(
        "on resume, keep the checkpoint's learning rates, weight decay and schedule"))
    override_opt_param_scheduler: Annotated[bool, Excludes("use_checkpoint_opt_param_scheduler")] = Field(
        False, description=(
            "on resume, use the command line's learning rates, weight decay and schedule"))
    no_load_rng: Annotated[bool, LOCAL] = Field(False, description="do not load random states")
    no_save_optim: bool = Field(False, description="do not save optimizer state")
    no_save_rng: bool = Field(False, description="do not save random states")
    allow_used_save: bool = Field(False, description=(
        "save even if another run has saved there: replaces its checkpoints of the same iterations, deletes none"))
    save_interval: Count | None = Field(None, description="steps between checkpoints; absent = only at the end")
    keep_last_checkpoints: Annotated[Count | None, Needs("save")] = Field(None, description=(
        "number of newest checkpoints to keep; absent = all, or 1 with --save-retain-interval"))
    save_retain_interval: Annotated[Count | None, Needs("save")] = Field(None, description=(
        "checkpoints of iterations that are its multiples are never deleted"))
    save_on_each_node: Annotated[bool, Needs("save")] = Field(False, description=(
        "--save is on each node's own disk: save there what its ranks need to resume; no effect on a shared directory"))
    async_save: bool = Field(False, description=(
        "write checkpoints in the background, from a copy in host memory, while training continues"))

    log_interval: Annotated[Count, Group("Reports")] = Field(100, description="steps between log lines")
    wandb_project: PathOrNone = Field(None, description="project of Weights & Biases; absent = not used")
    wandb_exp_name: Annotated[PathOrNone, Idle("wandb_project")] = Field(
        None, description="name of the run in Weights & Biases; absent = generated")
    wandb_save_dir: Annotated[PathOrNone, Idle("wandb_project")] = Field(
        None, description="directory of wandb's files; absent = --log-dir")
    swanlab_project: PathOrNone = Field(None, description="project of SwanLab; absent = not used")
    swanlab_exp_name: Annotated[PathOrNone, Idle("swanlab_project")] = Field(
        None, description="name of the run in SwanLab; absent = generated")
    swanlab_save_dir: Annotated[PathOrNone, Idle("swanlab_project")] = Field(
        None, description="directory of SwanLab's files; absent = in --log-dir")
    log_style: Literal["megatron", "short"] = Field("megatron", description=(
        "what is printed of a step: MindSpeed-MM's whole line, or a short one, with the whole lines in train.log of "
        "--log-dir"))
    log_tps: bool = Field(False, description="add tokens per sample to the log line")
    log_throughput: bool = Field(False, description="add model FLOP/s to the log line")
    log_timers: bool = Field(False, description=(
        "add a breakdown of the step time, maximum over the ranks; the host then waits for each step to end"))
    slow_rank_share: Positive = Field(0.2, description=(
        "note a rank that stays slower than the same stage of the other replicas by more than this share"))
    page: bool = Field(False, description=(
        "at the end, write a page of the run, run.html in --log-dir: curves, tables, timeline and answers"))
    profile_pipeline: Count | None = Field(
        None, description="iteration whose timeline is written to --log-dir, as an SVG file and a trace")
    profile: bool = Field(False, description="run the profiler of torch or torch_npu")
    profile_step_start: Annotated[Count, Idle("profile")] = Field(10, description="first iteration that is profiled")
    profile_step_end: Annotated[Count, Idle("profile")] = Field(
        12, description="iteration before which the profiler stops")
    profile_ranks: Annotated[Numbers, Idle("profile")] = Field((0,), description="ranks that are profiled")
    profile_save_path: Annotated[PathOrNone, Idle("profile")] = Field(
        None, description="directory of the profiles; absent = profile in --log-dir")
    dry_run_patches: NaturalNumber | None = Field(
        None, description="patches per microbatch in the dry run's memory; absent = none, and as many as tokens allow")
    dry_run: bool = Field(False, description="check everything, print the contents of each stage, and exit")
    check: bool = Field(False, description="check everything including all files and samples, and exit")

    @property
    def sharding(self) -> Sharding:
        """The strategy, given or implied by ``--use-distributed-optimizer``."""
        default: Sharding = "optim" if self.use_distributed_optimizer else "no_shard"
        return self.data_parallel_sharding_strategy or default

    @property
    def splits_optimizer(self) -> bool:
        """Whether each rank keeps only its shard of the optimizer's state."""
        return self.sharding != "no_shard"

    @property
    def shards_gradients(self) -> bool:
        """Whether each rank is to keep only its shard of the gradients."""
        return self.sharding in ("optim_grads", "optim_grads_params")

    @property
    def shards_weights(self) -> bool:
        """Whether each rank is to keep only its shard of the weights."""
        return self.sharding == "optim_grads_params"

    @property
    def gathers_during_forward(self) -> bool:
        """Whether updated weights arrive as a whole during the next forward pass; weights in shards never do."""
        return self.overlap_param_gather and not self.shards_weights

    @property
    def kept_copy(self) -> KeptCopy:
        return "remainder" if self.store_param_remainders else "none" if self.main_params_dtype == "bf16" else "fp32"

    @property
    def host_share(self) -> float:
        """Share of the optimizer states that are kept in host memory."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    @property
    def phase_seconds(self) -> dict[str, float]:
        """``PHASE_SECONDS`` with the limits of ``--phase-timeouts``; 0 is no limit."""
        pairs = (word.partition("=") for word in self.phase_timeouts)
        return {**PHASE_SECONDS, **{name: float(seconds) for name, _, seconds in pairs}}

    @property
    def loss_unit(self) -> LossUnit:
        """The unit over which the loss is a mean; the loss of one unit is the mean over its target tokens."""
        return "sample" if self.calculate_per_sample_loss else (
            "microbatch" if self.calculate_per_microbatch_loss else "token")

    @property
    def loads_optimizer(self) -> bool:
        """Whether training continues with the optimizer state of ``--load``, if that has one."""
        return not (self.finetune or self.no_load_optim)

    @property
    def loads_what_it_saves(self) -> bool:
        """Whether ``--load`` is ``--save``, so that the same command starts a run and continues it."""
        return is_same_directory(self.load, self.save)

    @property
    def given_start(self) -> dict[str, str | None]:
        """The absolute paths of what the run starts from.  They identify the command that started a run."""
        paths = {"load": self.load, "load_base_model": self.load_base_model,
                 "pretrained_checkpoint": self.pretrained_checkpoint}
        return {name: None if path is None else os.path.abspath(path) for name, path in paths.items()}

    @property
    def may_begin(self) -> bool:
        """Whether the run may start from something other than ``--load``; the files decide."""
        return self.loads_what_it_saves or (self.load is None and self.pretrained_checkpoint is not None)

    @property
    def recompute(self) -> RecomputeConfig:
        """The recompute flags as one setting."""
        return RecomputeConfig(
            self.recompute_granularity, self.recompute_method, self.recompute_num_layers, self.recompute_modules)

    @property
    def offload(self) -> OffloadConfig:
        """The flags of offloaded activations as one setting; either switches it on, the second as in Megatron-LM."""
        return OffloadConfig(self.cpu_offload_activations or None, self.cpu_offloading_num_layers)

    @property
    def lora(self) -> LoraConfig:
        """The flags of adapters as one setting."""
        return LoraConfig(
            tuple(word for one in self.lora_target_modules for word in one.split(",") if word), self.lora_r,
            self.lora_alpha, self.lora_dropout, self.lora_use_rslora, self.lora_rank_pattern, self.lora_alpha_pattern)


TRAIN = CommandLine(
    "mm-train", f"Train {TITLES} with tensor, context, pipeline and data parallelism.  The "
    "short form needs no JSON files: mm-train --model --help.", Arguments,
    "--mm-model JSON --mm-data JSON --micro-batch-size N --seq-length N (--train-iters N | --num-train-epochs X) "
    "--lr X [flags]", FLAGS, one_of=(("--train-iters", "--num-train-epochs"),))


def parse(argv: Sequence[str]) -> Arguments:
    """Read the command line; raises UserError with every problem of single flags."""
    return TRAIN.read(TRAIN.split(argv))
