"""Every key of the model and data JSON: what it takes, which values are supported, or why it has no effect.

The names and meanings are MindSpeed-MM's, so that its files load as they are; ``text_decoder.freeze`` is the one key of
ours.  Tables only: what a field means is said in ``mm.config.model``.
"""

from mm.config.json_schema import (
    BOOL,
    COUNT,
    FLOAT,
    INT,
    INTS,
    LAYOUT,
    OBJECT,
    PATHS,
    TEXT,
    Fixed,
    Inert,
    Rule,
    Takes,
    at_least,
    optional,
)

_POSITIVE = at_least(0, FLOAT)
_KERNEL = "the device chooses its kernels"
_FLAG_DECIDES = "the command line flag decides"
_UNUSED = "MindSpeed-MM does not read it on this path either"
_NO_VIDEO = "this version trains on images and text, not on video or audio"
_ON_THE_FLY = "samples are prepared on the fly, without a cache"
_NOT_HERE = "not supported by this version"
_NO_MOE = Fixed((None, 0, False), "mixtures of experts are not part of Qwen2.5-VL")
_HETERO = Fixed((None,), "every tower uses the parallel sizes of the command line")
_CONTEXT_PARALLEL = Fixed((1, None), "context parallelism is not supported by this version")
_UNSUPPORTED = Fixed((None, False), _NOT_HERE)
_NONE_ONLY = Fixed((None,), _NOT_HERE)

PRECISION_KEYS: dict[str, Rule] = {"fp16": Takes(BOOL), "bf16": Takes(BOOL), "params_dtype": Takes(TEXT)}
"""Compared with the flags; no fields of their own."""

RECOMPUTE_KEYS: dict[str, Rule] = {
    "recompute_granularity": Takes(optional(TEXT)),
    "recompute_method": Takes(optional(TEXT)),
    "recompute_num_layers": Takes(optional(COUNT)),
}
"""Fields of ``RecomputeConfig``, behind the prefix ``recompute_``."""

_TOWER: dict[str, Rule] = {
    **PRECISION_KEYS,
    "normalization": Fixed(("RMSNorm",)),
    "layernorm_epsilon": Takes(_POSITIVE),
    "freeze": Takes(BOOL),
    "hidden_dropout": Fixed((0.0,), "dropout is not part of this model"),
    "attention_dropout": Fixed((0.0,), "dropout is not part of this model"),
    "bias_activation_fusion": Inert(_KERNEL),
    "bias_dropout_fusion": Inert(_KERNEL),
    "use_fused_rotary_pos_emb": Inert(_KERNEL),
    "context_parallel_size": _CONTEXT_PARALLEL,
    "sequence_parallel": Inert(_FLAG_DECIDES),
    "tp": _HETERO,
    "pp": _HETERO,
    "cp": _HETERO,
}

VISION_KEYS: dict[str, Rule] = {
    **_TOWER,
    **RECOMPUTE_KEYS,
    "model_id": Fixed(("qwen2vit", "qwen2_5_vit"), "the ViT of Qwen2.5-VL"),
    "num_layers": Takes(COUNT),
    "pipeline_num_layers": Takes(LAYOUT),
    "hidden_size": Takes(COUNT),
    "ffn_hidden_size": Takes(COUNT),
    "num_attention_heads": Takes(COUNT),
    "window_attn_size": Takes(COUNT),
    "fullatt_block_indexes": Takes(INTS),
    "in_channels": Takes(COUNT),
    "patch_size": Takes(COUNT),
    "temporal_patch_size": Takes(COUNT),
    "spatial_merge_size": Takes(COUNT),
    "tokens_per_second": Takes(COUNT),
    "activation_func": Fixed(("silu",)),
    "gated_linear_unit": Fixed((True,)),
    "add_bias_linear": Fixed((True,)),
    "post_layer_norm": Fixed((False,)),
    "canonical_model": Inert("the model is that of Hugging Face either way, and --load reads both structures"),
    "attention_mask_type": Inert("attention runs over variable-length segments, without masks"),
    "use_vit_dp": Inert("it concerns context parallelism only"),
    "llm_hidden_size": Inert(_UNUSED),
    "intermediate_size": Inert(_UNUSED),
    "init_method_std": Inert("text_decoder.init_method_std counts for the whole model"),
}

PROJECTOR_KEYS: dict[str, Rule] = {
    **_TOWER,
    "model_id": Fixed(("lnmlp",), "RMSNorm and two linear layers"),
    "num_layers": Fixed((1,)),
    "input_size": Takes(COUNT),
    "ffn_hidden_size": Takes(COUNT),
    "hidden_size": Takes(COUNT),
    "activation_func": Fixed(("gelu",)),
    "gated_linear_unit": Fixed((False,)),
    "add_bias_linear": Fixed((True,)),
    "num_attention_heads": Inert("the projector has no attention"),
    "init_method_std": Inert("text_decoder.init_method_std counts for the whole model"),
}

LANGUAGE_KEYS: dict[str, Rule] = {
    **_TOWER,
    **RECOMPUTE_KEYS,
    "model_id": Fixed(("qwen2_5_lm",), "the LLM of Qwen2.5-VL"),
    "num_layers": Takes(COUNT),
    "pipeline_num_layers": Takes(LAYOUT),
    "hidden_size": Takes(COUNT),
    "ffn_hidden_size": Takes(COUNT),
    "num_attention_heads": Takes(COUNT),
    "num_query_groups": Takes(COUNT),
    "group_query_attention": Fixed((True,)),
    "kv_channels": Takes(optional(COUNT)),
    "vocab_size": Takes(COUNT),
    "max_position_embeddings": Takes(COUNT),
    "mrope_section": Takes(INTS),
    "rope_theta": Takes(_POSITIVE),
    "rotary_base": Takes(_POSITIVE, field="rope_theta"),
    "untie_embeddings_and_output_weights": Takes(BOOL),
    "init_method_std": Takes(_POSITIVE),
    "position_embedding_type": Fixed(("mrope",)),
    "rope_scaling": Fixed((None,), _NOT_HERE),
    "activation_func": Fixed(("silu",)),
    "gated_linear_unit": Fixed((True,)),
    "add_bias_linear": Fixed((False,)),
    "add_qkv_bias": Fixed((True,)),
    "attention_softmax_in_fp32": Fixed((True,)),
    "canonical_model": Inert("the model is that of Hugging Face either way, and --load reads both structures"),
    "parallel_output": Inert("the output layer is always split over the tensor-parallel ranks"),
    "use_remove_padding": Inert("samples are always packed, without padding"),
    "seq_length": Inert("--seq-length decides"),
    "disable_bias_linear": Inert(_UNUSED),
    "num_moe_experts": _NO_MOE,
    "moe_router_topk": _NO_MOE,
}

MODEL_KEYS: dict[str, Rule] = {
    "model_id": Fixed(("qwen2_5vl",), "this trainer is for Qwen2.5-VL"),
    "img_context_token_id": Takes(INT, field="image_token_id"),
    "video_token_id": Takes(INT, field="video_token_id"),
    "vision_start_token_id": Takes(INT, field="vision_start_token_id"),
    "image_encoder": Takes(OBJECT),
    "text_decoder": Takes(OBJECT),
    "text_encoder": _NONE_ONLY,
    "video_encoder": _NONE_ONLY,
    "audio_encoder": _NONE_ONLY,
    "patch": Takes(optional(OBJECT)),
    "lora_mixed_training": _UNSUPPORTED,
    "lora_apply_modules": Fixed((None, []), _NOT_HERE),
}

IMAGE_ENCODER_KEYS: dict[str, Rule] = {"vision_encoder": Takes(OBJECT), "vision_projector": Takes(OBJECT)}

PATCH_KEYS: dict[str, Rule] = {
    "bridge_patch": Inert("--load reads Hugging Face and converted weights alike"),
    "infer_fa": Inert("it concerns inference only"),
    "clip_grad_async": Inert("gradient clipping never waits for the host here"),
    "adaptive_clip_grad_norm": _UNSUPPORTED,
    "ae_float32": _UNSUPPORTED,
    "use_fsdp1": _UNSUPPORTED,
    "get_dist_model_load_from_pt": _UNSUPPORTED,
    "scale_grad": _UNSUPPORTED,
    "muon_optimizer": _UNSUPPORTED,
    "layerwise_disaggregated_training": _UNSUPPORTED,
}

DATA_KEYS: dict[str, Rule] = {"dataset_param": Takes(OBJECT), "dataloader_param": Takes(OBJECT)}

DATASET_KEYS: dict[str, Rule] = {
    "dataset_type": Fixed(("huggingface",), "conversations with images"),
    "preprocess_parameters": Takes(OBJECT),
    "basic_parameters": Takes(OBJECT),
    "attr": Takes(OBJECT),
}

PREPROCESS_KEYS: dict[str, Rule] = {
    "model_name_or_path": Takes(TEXT),
    "image_max_pixels": Takes(COUNT),
    "image_min_pixels": Takes(at_least(0, INT)),
    "use_fast_tokenizer": Inert("there is one tokenizer implementation"),
    "split_special_tokens": Inert("the chat encoder decides how text that looks like a special token is read"),
    **{key: Inert(_NO_VIDEO) for key in ("video_max_pixels", "video_min_pixels", "video_fps", "video_maxlen",
                                         "audio_sampling_rate")},
    "image_resolution": Inert(_UNUSED),
    "video_resolution": Inert(_UNUSED),
    "fix_mistral_regex": Inert("it concerns another tokenizer"),
    "image_do_pan_and_scan": _UNSUPPORTED,
    "crop_to_patches": _UNSUPPORTED,
    "use_audio_in_video": _UNSUPPORTED,
    "trust_remote_code": Fixed((None, False), "code out of a model directory is never run"),
}

BASIC_KEYS: dict[str, Rule] = {
    "template": Fixed(("qwen2vl",), "the chat template of Qwen2.5-VL"),
    "dataset": Takes(PATHS),
    "dataset_dir": Takes(TEXT),
    "train_on_prompt": Takes(BOOL),
    "mask_history": Takes(BOOL),
    "max_samples": Takes(optional(COUNT)),
    "enable_thinking": Inert("Qwen2.5-VL has no thinking mode"),
    **{key: Inert(_ON_THE_FLY) for key in ("cache_dir", "overwrite_cache", "preprocessing_batch_size",
                                           "preprocessing_num_workers", "preprocess_on_fly", "async_preprocess",
                                           "async_preprocess_buffer_size")},
    "cutoff_len": Fixed((None,), "--seq-length is the longest sample"),
    "tool_format": _NONE_ONLY,
    "streaming": _UNSUPPORTED,
    "val_dataset": _NONE_ONLY,
    "val_max_samples": _NONE_ONLY,
    "val_rate": Fixed((None, 0.0), _NOT_HERE),
    "packing": Fixed((None, False), "the samples of a microbatch are packed anyway; --micro-batch-size says how many"),
    "neat_packing": Fixed((None, False), "packed samples never see one another here"),
    "use_pmcc_data": _UNSUPPORTED,
}

ATTRIBUTE_KEYS: dict[str, Rule] = {
    "messages": Takes(TEXT),
    "images": Takes(optional(TEXT)),
    "system": Takes(optional(TEXT)),
    "role_tag": Takes(TEXT),
    "content_tag": Takes(TEXT),
    "user_tag": Takes(TEXT),
    "assistant_tag": Takes(TEXT),
    "system_tag": Takes(optional(TEXT)),
    "formatting": Fixed(("sharegpt",), "lists of messages"),
    "videos": Fixed((None,), _NO_VIDEO),
    "audios": Fixed((None,), _NO_VIDEO),
    "packing": Fixed((None, False), "the samples of a microbatch are packed anyway; --micro-batch-size says how many"),
    "ranking": _UNSUPPORTED,
    "pretrain": _UNSUPPORTED,
    **{key: _NONE_ONLY for key in ("observation_tag", "function_tag", "tools", "prompt", "query", "response",
                                   "history", "chosen", "rejected")},
}

DATALOADER_KEYS: dict[str, Rule] = {
    "dataloader_mode": Fixed(("sampler",), "the others are for streaming and video generation"),
    "sampler_type": Takes(TEXT),
    "shuffle": Takes(BOOL),
    "prefetch_factor": Takes(optional(COUNT)),
    "drop_last": Inert("every step takes a full global batch"),
    "pin_memory": Inert(_KERNEL),
    "persistent_workers": Inert("data workers live as long as the training"),
    "num_workers": Inert("--num-workers decides"),
    "batch_size": Inert("--micro-batch-size decides"),
    "priority_mode": Inert("it concerns the BucketBatchSampler only"),
    "data_sharding": _UNSUPPORTED,
    "collate_param": Takes(optional(OBJECT)),
}

COLLATE_KEYS: dict[str, Rule] = {
    "model_name": Fixed(("qwen2vl",), "the collator of Qwen2.5-VL"),
    "ignore_pad_token_for_loss": Inert("nothing is padded"),
}

SHUFFLING_SAMPLERS = {
    "BaseRandomBatchSampler": True,
    "stateful_distributed_sampler": True,
    "SequentialSampler": False,
}
"""Supported ``sampler_type`` -> whether it shuffles at all."""
