"""Flags and JSON keys of Megatron and MindSpeed-MM that do nothing here or are refused, with the reasons.

Those that have an effect are fields in ``mm.config.args``, ``mm.config.model`` and ``mm.config.data``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mm.families import TITLES, names_of

OTHER_MODELS = f"this version trains {TITLES}, neither Qwen2-VL nor Qwen3-VL"
AUDIO = "this version trains on images, videos and text, not on audio"
TOOLS = "samples with tool turns are refused"
PREFERENCES = "preference training is not supported by this version"
TWO_COLUMNS = ("a question and an answer in two columns, as in ms-swift's query and response, are read only if "
               "attr.prompt and attr.response in the data JSON name these columns")


@dataclass(frozen=True)
class Fixed:
    """A word whose only legal values are ``supported``; ``why`` gives the reason, or what to write instead."""

    supported: tuple[Any, ...]
    why: str = "the only value that this model supports"


@dataclass(frozen=True)
class Inert:
    """A word that is accepted and has no effect, for the reason ``why``."""

    why: str


@dataclass(frozen=True)
class SameAs:
    """Alias of ``flag``, optionally implying ``value``; an explicit ``flag`` wins."""

    flag: str
    value: str | None = None


Row = Fixed | Inert
"""Meaning of a key of a JSON file."""
FlagRow = Row | SameAs


def rows(row: Row, words: str) -> dict[str, Row]:
    """The same ``row`` for each of the words."""
    return dict.fromkeys(words.split(), row)


_KERNEL = Inert("the device chooses its kernels")
_NO_TRUST = "code from a model directory is never run"

FLAGS: Mapping[str, FlagRow] = {
    **rows(Inert("the model JSON decides"),
           "--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --group-query-attention "
           "--num-query-groups --kv-channels --max-position-embeddings --position-embedding-type --rotary-base "
           "--rotary-percent --vocab-size --padded-vocab-size --normalization --swiglu --norm-epsilon "
           "--init-method-std --attention-dropout --hidden-dropout --add-qkv-bias --disable-bias-linear "
           "--untie-embeddings-and-output-weights --attention-softmax-in-fp32 --make-vocab-size-divisible-by"),
    **rows(_KERNEL,
           "--use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb "
           "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
           "--no-rope-fusion --no-gradient-accumulation-fusion --attention-backend --transformer-impl --jit-compile "
           "--allow-tf32 --allow-internal-format"),
    **rows(Inert("checkpoints have one format here: safetensors and JSON"),
           "--ckpt-format --use-dist-ckpt --auto-detect-ckpt-format"),
    **rows(Inert("always on: SIGTERM, SIGUSR1 and Ctrl-C save after the running step and stop"),
           "--exit-signal-handler --exit-signal --exit-signal-handler-for-dataloader"),
    "--use-mcore-models": Inert("megatron-core is the only engine"),
    **rows(Inert("the tokenizer comes from model_name_or_path in the data JSON"), "--tokenizer-type --tokenizer-model"),
    "--distributed-backend": Inert("the device decides: hccl, nccl or gloo"),
    "--fsdp2-config-path": Inert(
        "with --use-torch-fsdp2 all weights are sharded over all ranks that hold the same ones, in a bucket for each "
        "layer; the flags decide precision and recomputation"),
    "--mm-tool": Inert("the profiler is configured by --profile and the other --profile flags, not by that file"),
    **rows(Inert("--profile records the operators of host and device, without stacks, shapes and memory"),
           "--use-pytorch-profiler --profile-level --profile-with-cpu --profile-with-stack --profile-with-memory "
           "--profile-record-shapes --profile-data-simplification --profile-export-type"),
    **rows(Inert("--log-timers breaks down the time of a step"), "--timing-log-level --timing-log-option"),
    **rows(Inert("always on: the log names the three slowest ranks"),
           "--log-straggler --disable-straggler-on-startup --straggler-ctrlr-port --straggler-minmax-count"),
    **rows(Inert("always on: every rank knows all shapes of a step before it begins"),
           "--variable-seq-lengths --check-p2p"),
    "--enable-dummy-optimizer": Inert("always on: a stage without trainable parameters needs no optimizer"),
    **rows(Inert("it only affects memory; --cpu-offload-activations keeps activations of whole layers in host memory, "
                 "and --recompute-granularity recomputes them"), "--swap-attention --swap-modules"),
    **rows(Inert("it only affects memory and speed and is not supported here; --recompute-granularity saves memory"),
           "--adaptive-memory-optimization "
           "--adaptive-recompute-device-size --recompute-in-advance "
           "--optimize-send-recv-comm --use-ascend-mc2 --use-ascend-coc --use-fusion-attn-v2 "
           "--manual-gc --manual-gc-interval --empty-unused-memory-level --tp-comm-overlap "
           "--overlap-p2p-communication-warmup-flush --no-align-grad-reduce"),
    "--override-opt_param-scheduler": SameAs("--override-opt-param-scheduler"),
    "--use-checkpoint-opt_param-scheduler": SameAs("--use-checkpoint-opt-param-scheduler"),
    **dict.fromkeys(("--use-deter-comp", "--npu-deterministic"), SameAs("--deterministic-mode")),
    **rows(Inert("the model has no experts"), "--moe-token-dispatcher-type --moe-grouped-gemm --moe-permute-fusion"),
    **rows(Inert("--recompute-granularity selective recomputes norms and activation functions"),
           "--recompute-norm --recompute-activation-function"),
    "--no-load-args": Inert("arguments never come from a checkpoint"),
    "--trust-remote-code": Inert(_NO_TRUST),
    "--optimizer": Fixed(("adam",), "expected adam"),
    "--use-precision-aware-optimizer": Inert(
        "--exp-avg-dtype, --exp-avg-sq-dtype and --main-params-dtype work without it; where Megatron then stores "
        "remainders of bf16 weights, add --store-param-remainders"),
    "--no-store-param-remainders": Inert("fp32 copies of weights are kept unless --store-param-remainders is given"),
    "--reuse-fp32-param": SameAs("--store-param-remainders"),
    "--swap-optimizer": SameAs("--optimizer-cpu-offload"),
    **rows(Inert("states in host memory pass through the device in blocks of fixed size; the next one comes while one "
                 "is updated and goes back"),
           "--swap-optimizer-times --overlap-cpu-optimizer-d2h-h2d --use-torch-optimizer-for-cpu-offload "
           "--no-pin-cpu-grads --no-pin-cpu-params"),
    "--main-grads-dtype": Fixed(("fp32",), "write --grad-reduce-in-bf16 for gradients in bf16"),
    **rows(Fixed((), "set lora_apply_modules or lora_mixed_training in the model JSON, where MindSpeed-MM reads them "
                     "too"), "--lora-apply-modules --lora-mixed-training"),
    "--lora-target-parameters": Fixed((), "only linear layers can have adapters: use --lora-target-modules"),
    "--lora-register-forward-hook": Inert("gradients pass through frozen layers without hooks"),
    **rows(Fixed((), PREFERENCES),
           "--dpo-beta --dpo-loss-type --dpo-ftx --dpo-label-smoothing --ref-model --pref-ftx --stage"),
    **dict.fromkeys(("--use-torch-fsdp2", "--use-megatron-fsdp"),
                    SameAs("--data-parallel-sharding-strategy", "optim_grads_params")),
    **rows(Inert("weights are the same wherever they are first created"),
           "--init-model-with-meta-device --use-cpu-initialization --no-initialization"),
    "--hetero-parallel": Fixed((), (
        "both towers have the tensor-parallel size of the command line; remove it together with tp, pp and cp of the "
        "towers, and set pipeline_num_layers of each tower in the model JSON, which can place ViT and LLM on different "
        "stages, or encoder_placement to tensor_ranks, which keeps the ViT whole on every tensor-parallel rank; --load "
        "takes the weights from before convert_base_to_hetero, or the Hugging Face directory")),
    "--hetero-encoder-mbs-scale": Fixed((), (
        "it has an effect only with --hetero-parallel; here all images of a microbatch pass the ViT in one call, so "
        "raise --micro-batch-size instead")),
    "--encoder-dp-balance": Fixed((), (
        "set sampler_type to BalancedBatchSampler in the data JSON: it balances the images of all replicas")),
    "--unaligned-linear": Fixed((), (
        "remove it: dimensions that tensor parallelism does not divide are padded here, such as the ViT's 3420")),
    **rows(Fixed((), "set sampler_type to BalancedBatchSampler in the data JSON: it balances ViT and LLM together"),
           "--use-data-balance --data_balance_sorting_algo --use-image-mbs-data-balance "
           "--mbs_data_balance_sorting_algo"),
    **rows(Fixed((), "set packing to true in basic_parameters of the data JSON; --seq-length is the budget"),
           "--use-txt-dynamic-batching --max-seq-len --dynamic-batch-buffer-size"),
    **rows(Fixed((), "only the Adam optimizer is supported by this version"),
           "--matched-adamw-rms --muon-momentum --ns-steps"),
    **rows(Fixed((), "use steps or epochs: --train-iters or --num-train-epochs; --lr-decay-iters, --lr-warmup-iters"),
           "--train-samples --lr-decay-samples --lr-warmup-samples --rampup-batch-size"),
    **rows(Fixed((), "use --recompute-granularity selective"),
           "--recompute-activations --recompute-skip-core-attention --recompute-num-layers-skip-core-attention"),
    "--calculate-square-loss": Fixed((), "use --calculate-per-token-loss or --calculate-per-sample-loss"),
    "--calculate-token-loss": Fixed((), "use --calculate-per-token-loss"),
    "--num-layers-per-virtual-pipeline-stage": Fixed((), "give pipeline_num_layers one list per virtual chunk instead"),
    "--downcast-to-bf16": Fixed((), "write --bf16"),
    **rows(Fixed((), "it is not supported by this version"),
           "--profile-stage --profile-subgraph-seg --simulated-nnodes --simulated-nproc-per-node"),
    "--ai-framework": Fixed(("pytorch",), (
        "the model runs on PyTorch, not on MindSpore: remove the flag and start the script with torchrun instead of "
        "msrun; model JSON, data and Hugging Face weights stay as they are")),
}
"""Flags that are no fields of ``mm.config.args``."""

_UNUSED = Inert("MindSpeed-MM does not read it on this path either")
_STRUCTURE = Inert("the model always has Hugging Face's structure, and --load reads both")
_INIT = Inert("text_decoder.init_method_std applies to the whole model")
NOT_HERE = "not supported by this version"
_OFF = Fixed((None, False), NOT_HERE)
_NULL = Fixed((None,), NOT_HERE)
_PRECISION = "it repeats --bf16 or --fp16"

_TOWER: dict[str, Row] = {
    **rows(Fixed((True, False), _PRECISION), "fp16 bf16"),
    "params_dtype": Fixed(("bf16", "fp16", "fp32", "bfloat16", "float16", "float32"), _PRECISION),
    "normalization": Fixed(("RMSNorm",)),
    **rows(Fixed((0.0,), "dropout is not part of this model"), "hidden_dropout attention_dropout"),
    **rows(_KERNEL, "bias_activation_fusion bias_dropout_fusion use_fused_rotary_pos_emb"),
    "context_parallel_size": Inert("the command line flag decides"),
    "sequence_parallel": Inert("the command line flag decides"),
    **rows(Fixed((None,), "every tower uses the parallel sizes of the command line"), "tp pp cp"),
    "cpu_offloading": Fixed((None,), "remove it: cpu_offloading_activations and cpu_offloading_num_layers decide"),
    "cpu_offloading_weights": Fixed((False,), "weights stay on the device; remove it, and for fewer of them on each "
                                              "device give --data-parallel-sharding-strategy optim_grads_params"),
    "cpu_offloading_double_buffering": Inert("always on: one layer comes or goes while the next one is computed"),
}

MODEL_KEYS: Mapping[str, Mapping[str, Row]] = {
    "": {
        "model_id": Fixed(names_of(lambda family: family.mindspeed.model_ids), f"this trainer is for {TITLES}"),
        **rows(_NULL, "text_encoder video_encoder audio_encoder"),
    },
    "image_encoder": {},
    "patch": {
        "bridge_patch": Inert("--load reads both Hugging Face and converted weights"),
        "infer_fa": Inert("it affects inference only"),
        "clip_grad_async": Inert("the host reads the device once per step, loss and gradient norm together"),
        **rows(_OFF, "adaptive_clip_grad_norm ae_float32 use_fsdp1 get_dist_model_load_from_pt scale_grad "
                     "muon_optimizer layerwise_disaggregated_training"),
    },
    "image_encoder.vision_encoder": {
        **_TOWER,
        "model_id": Fixed(names_of(lambda family: family.mindspeed.vision_ids), f"the ViT of {TITLES}"),
        "activation_func": Fixed(("silu",)),
        **rows(Fixed((True,)), "gated_linear_unit add_bias_linear"),
        "post_layer_norm": Fixed((False,)),
        "canonical_model": _STRUCTURE,
        "attention_mask_type": Inert("attention runs over variable-length segments, without masks"),
        "use_vit_dp": Inert("always on: context-parallel ranks share the images, each image on one rank"),
        **rows(_UNUSED, "llm_hidden_size intermediate_size"),
        "init_method_std": _INIT,
    },
    "image_encoder.vision_projector": {
        **_TOWER,
        "model_id": Fixed(names_of(lambda family: family.mindspeed.projector_ids), "RMSNorm and two linear layers"),
        "num_layers": Fixed((1,)),
        "activation_func": Fixed(("gelu",)),
        "gated_linear_unit": Fixed((False,)),
        "add_bias_linear": Fixed((True,)),
        "num_attention_heads": Inert("the projector has no attention"),
        "init_method_std": _INIT,
        "cpu_offloading": Inert("the projector's activations stay on the device"),
    },
    "text_decoder": {
        **_TOWER,
        "model_id": Fixed(names_of(lambda family: family.mindspeed.language_ids), f"the LLM of {TITLES}"),
        "position_embedding_type": Fixed(("mrope",)),
        "rope_scaling": _NULL,
        "activation_func": Fixed(("silu",)),
        **rows(Fixed((True,)), "group_query_attention gated_linear_unit add_qkv_bias attention_softmax_in_fp32"),
        "add_bias_linear": Fixed((False,)),
        "canonical_model": _STRUCTURE,
        "parallel_output": Inert("the output layer is always split over the tensor-parallel ranks"),
        "use_remove_padding": Inert("samples are always packed, without padding"),
        "seq_length": Inert("--seq-length decides"),
        "disable_bias_linear": _UNUSED,
        **rows(Fixed((None, 0, False), f"mixtures of experts are not part of {TITLES}"),
               "num_moe_experts moe_router_topk"),
    },
}
"""Object of the model JSON -> its keys that are no fields of ``mm.config.model``."""

DATA_KEYS: Mapping[str, Mapping[str, Row]] = {
    "": {},
    "dataset_param": {"dataset_type": Fixed(("huggingface",), "conversations with images")},
    "dataset_param.preprocess_parameters": {
        "use_fast_tokenizer": Inert("there is one tokenizer implementation"),
        "split_special_tokens": Inert("text that looks like a control token is always read as plain text"),
        "audio_sampling_rate": Inert(AUDIO),
        "video_resolution": _UNUSED,
        "fix_mistral_regex": Inert("it affects another tokenizer"),
        **rows(_OFF, "image_do_pan_and_scan crop_to_patches use_audio_in_video"),
        "trust_remote_code": Fixed((None, False), _NO_TRUST),
    },
    "dataset_param.basic_parameters": {
        "template": Fixed(names_of(lambda family: family.mindspeed.templates), f"the chat template of {TITLES}"),
        "enable_thinking": Inert(f"{TITLES} has no thinking mode"),
        **rows(Inert("samples are prepared on the fly; only their lengths are cached, in cache_dir"),
               "preprocessing_batch_size preprocess_on_fly async_preprocess async_preprocess_buffer_size"),
        "cutoff_len": Fixed((None,), "--seq-length is the longest sample"),
        "tool_format": Inert(TOOLS),
        "use_pmcc_data": _OFF,
        "streaming": Fixed((None, False), (
            "remove it: samples are read when a step needs them, and only their index is in memory")),
    },
    "dataset_param.attr": {
        "audios": Fixed((None,), AUDIO),
        **rows(_OFF, "ranking pretrain"),
        **rows(Inert(TOOLS), "observation_tag function_tag"),
        **rows(_NULL, "tools chosen rejected"),
    },
    "dataloader_param": {
        "dataloader_mode": Fixed(("sampler",), (
            "the others are for streaming, which is not needed here, and for video generation")),
        "drop_last": Inert("every step takes a full global batch"),
        "pin_memory": Inert("the device decides how a batch is copied to it"),
        "persistent_workers": Inert("data workers live as long as the training"),
        "num_workers": Inert("--num-workers decides"),
        "batch_size": Inert("--micro-batch-size decides"),
        "data_sharding": Fixed((None, False), (
            "remove it: all replicas share one shuffle of all samples, and each reads only its own")),
    },
    "dataloader_param.collate_param": {
        "model_name": Fixed(names_of(lambda family: family.mindspeed.collators), f"the collator of {TITLES}"),
        "ignore_pad_token_for_loss": Inert("nothing is padded"),
    },
}
"""Object of the data JSON -> its keys that are no fields of ``mm.config.data``."""
