"""The record of Qwen2.5-VL."""

from mm.families.family import ConfigJson, Family, LayerNames, MindSpeedNames, WeightNames
from mm.families.qwen2_5_vl.config_json import KEYS, MODEL_TYPE, PUBLISHED
from mm.families.qwen2_5_vl.fixed import fixed_problems
from mm.families.qwen2_5_vl.tokens import TOKENS

_WEIGHTS = WeightNames(
    patch_embedding="visual.patch_embed.proj",
    vision_layer=LayerNames(
        layers="visual.blocks",
        first_norm="norm1",
        qkv=("attn.qkv",),
        projection="attn.proj",
        second_norm="norm2",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        has_bias=True,
    ),
    projector_norm="visual.merger.ln_q",
    projector_linears=("visual.merger.mlp.0", "visual.merger.mlp.2"),
    embedding="model.embed_tokens",
    language_layer=LayerNames(
        layers="model.layers",
        first_norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        projection="self_attn.o_proj",
        second_norm="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        has_bias=False,
    ),
    final_norm="model.norm",
    output_layer="lm_head",
    live_starts={"model.visual.": "visual.", "model.language_model.": "model."},  # since transformers 4.52
)

QWEN2_5_VL = Family(
    title="Qwen2.5-VL",
    mindspeed=MindSpeedNames(
        model_ids=("qwen2_5vl", "qwen2vl"),
        vision_ids=("qwen2vit", "qwen2_5_vit"),
        projector_ids=("lnmlp",),
        language_ids=("qwen2_5_lm",),
        pipelines=("Qwen2VlPipeline",),
        templates=("qwen2vl",),
        collators=("qwen2vl",),
        converter="Qwen2_5_VLConverter",
    ),
    tokens=TOKENS,
    weights=_WEIGHTS,
    config_json=ConfigJson(MODEL_TYPE, KEYS, fixed_problems, PUBLISHED),
    vision_epsilon=1e-6,
)
