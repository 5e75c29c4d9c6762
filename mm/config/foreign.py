"""Flags of Megatron and MindSpeed-MM that have no effect here, and those that this version refuses.  Tables only."""

_MODEL_JSON = "the model JSON decides"
_KERNELS = "the device chooses its kernels"
_FORMAT = "checkpoints have one format here: safetensors and JSON"

INERT: dict[str, str] = {
    **{flag: _MODEL_JSON for flag in (
        "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--group-query-attention",
        "--num-query-groups", "--kv-channels", "--max-position-embeddings", "--position-embedding-type",
        "--rotary-base", "--rotary-percent", "--vocab-size", "--padded-vocab-size", "--normalization", "--swiglu",
        "--norm-epsilon", "--init-method-std", "--attention-dropout", "--hidden-dropout", "--add-qkv-bias",
        "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--attention-softmax-in-fp32",
        "--make-vocab-size-divisible-by",
    )},
    **{flag: _KERNELS for flag in (
        "--use-flash-attn", "--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb",
        "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion",
        "--no-rope-fusion", "--no-gradient-accumulation-fusion", "--attention-backend", "--transformer-impl",
        "--jit-compile", "--allow-tf32", "--allow-internal-format",
    )},
    **{flag: _FORMAT for flag in ("--ckpt-format", "--use-dist-ckpt", "--auto-detect-ckpt-format", "--async-save")},
    "--use-mcore-models": "megatron-core is the only engine",
    "--tokenizer-type": "the tokenizer is that of model_name_or_path in the data JSON",
    "--tokenizer-model": "the tokenizer is that of model_name_or_path in the data JSON",
    "--distributed-backend": "the device decides: hccl, nccl or gloo",
    "--context-parallel-algo": "context parallelism is not supported by this version",
    "--mm-tool": "the profiler is not configured by that file",
    "--variable-seq-lengths": "always on: every rank knows all shapes of a step before it begins",
    "--enable-dummy-optimizer": "always on: a stage without trainable parameters needs no optimizer",
    "--eval-interval": "there is no validation data",
    "--eval-iters": "there is no validation data",
    "--no-load-args": "arguments never come from a checkpoint",
    "--trust-remote-code": "code out of a model directory is never run",
}
"""Accepted flag -> why it has no effect."""

UNSUPPORTED: dict[str, str] = {
    **{flag: "LoRA is not supported by this version" for flag in (
        "--lora-target-modules", "--lora-target-parameters", "--lora-apply-modules", "--lora-mixed-training",
        "--lora-dropout", "--lora-r", "--lora-alpha", "--lora-register-forward-hook", "--load-base-model",
    )},
    **{flag: "preference training is not supported by this version" for flag in (
        "--dpo-beta", "--dpo-loss-type", "--dpo-ftx", "--dpo-label-smoothing", "--ref-model", "--pref-ftx", "--stage",
    )},
    **{flag: "FSDP is not supported by this version; use the tensor, pipeline and data parallel sizes" for flag in (
        "--use-torch-fsdp2", "--fsdp2-config-path", "--init-model-with-meta-device", "--use-cpu-initialization",
        "--no-initialization",
    )},
    **{flag: "mixed parallel sizes per tower are not supported by this version" for flag in (
        "--hetero-parallel", "--hetero-encoder-mbs-scale", "--encoder-dp-balance", "--unaligned-linear",
    )},
    **{flag: "balancing by another sampler is not supported by this version" for flag in (
        "--use-data-balance", "--data_balance_sorting_algo", "--use-image-mbs-data-balance",
        "--use-txt-dynamic-batching", "--max-seq-len", "--dynamic-batch-buffer-size",
    )},
    **{flag: "only the Adam optimizer with one learning rate is supported by this version" for flag in (
        "--weight-decay-exclude-modules", "--lr-scale-modules", "--lr-mult", "--matched-adamw-rms", "--muon-momentum",
        "--ns-steps",
    )},
    **{flag: "give steps: --train-iters, --lr-decay-iters, --lr-warmup-iters" for flag in (
        "--train-samples", "--lr-decay-samples", "--lr-warmup-samples", "--rampup-batch-size",
    )},
    **{flag: "write --recompute-granularity selective" for flag in (
        "--recompute-activations", "--recompute-skip-core-attention", "--recompute-num-layers-skip-core-attention",
    )},
    "--calculate-square-loss": "write --calculate-per-token-loss or --calculate-per-sample-loss",
    "--calculate-token-loss": "write --calculate-per-token-loss",
    "--num-layers-per-virtual-pipeline-stage": "give pipeline_num_layers one list per virtual chunk instead",
    "--swap-attention": "it is not supported by this version; use --recompute-granularity",
    "--downcast-to-bf16": "write --bf16",
    "--profile": "it is not supported by this version",
    "--profile-stage": "it is not supported by this version",
    "--profile-subgraph-seg": "it is not supported by this version",
}
"""Refused flag -> what to do instead, or why."""
