"""Layouts and adapters whose loss, gradients and first two updates must equal PEFT's on transformers' model."""

from dataclasses import dataclass, replace
from typing import Any

from mm.config.lora import LoraConfig
from tests.parallel.cases import FEW_TOKENS, Case
from tests.parallel.cases import MATRIX as LAYOUTS

EVERY = LoraConfig(("all-linear", "patch_embed.proj"), r=3, alpha=5.0)
MIXED = replace(EVERY, mixed_training=True, apply_modules=("text_decoder", "vision_encoder"))
"""The projector is trained in whole."""
ONLY_LANGUAGE = replace(EVERY, mixed_training=True, apply_modules=("text_decoder",))
"""ViT and projector are."""
LANGUAGE = ("q_proj", "k_proj", "v_proj", "o_proj", "model.language_model.layers.*_proj")
VISION = ("qkv", "proj", "visual.blocks.*_proj")


@dataclass(frozen=True)
class LoraCase:
    """One layout of the small model with adapters; what is not of adapters is as in ``tests.parallel.cases``."""

    layout: Case
    lora: LoraConfig = EVERY

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def without_layout(self) -> "LoraCase":
        return LoraCase(self.layout.without_layout, replace(self.lora, dropout=0.0))


def _case(name: str, vision: Any = (4,), language: Any = (4,), lora: LoraConfig = EVERY, **others: Any) -> LoraCase:
    return LoraCase(Case(name, vision, language, **others), lora)


DROPPED = replace(EVERY, dropout=0.3)
VPP = {"vision": ((2, 1), (1, 0)), "language": ((0, 0), (1, 3))}
CASES = (
    _case("tp1"),
    _case("tp1-vision", lora=replace(EVERY, target_modules=VISION)),
    _case("tp1-mixed", lora=MIXED),
    _case("tp1-patterns-rslora", lora=replace(
        EVERY, target_modules=("layers.1-2.self_attention.linear_qkv", "blocks.0-1.mlp.up_proj", "model.*.gate_proj"),
        use_rslora=True, rank_pattern=(("k_proj", 2), ("up_proj", 5)), alpha_pattern=(("gate_proj", 9.0),))),
    _case("tp1-tied", tied=True),
    _case("tp1-norms-trained", trainable_modules=("norm",)),
    _case("tp1-recompute-mlp", recompute="selective mlp layernorm"),
    _case("tp2", tp=2),
    _case("tp2-sp", tp=2, sequence_parallel=True),
    _case("tp2-sp-selective-recompute", tp=2, sequence_parallel=True, recompute="selective", micro_batch_size=1,
          offload=3),
    _case("cp2-few-tokens", cp=2, **FEW_TOKENS),
    _case("ring2-few-tokens-recompute", cp=2, ring=True, recompute="selective mlp layernorm", **FEW_TOKENS),
    _case("pp2-vit-on-both", (3, 1), (0, 4)),
    _case("pp2-vpp2", **VPP),
    _case("dp2-distributed-optimizer-overlap", dp=2, sharding="optim", overlap=True, batch="images on one rank"),
    _case("dp2-shards-recompute", dp=2, sharding="optim_grads", recompute="uniform", batch="images on one rank"),
    _case("dp2-weight-shards-recompute", dp=2, sharding="optim_grads_params", recompute="uniform", overlap=True,
          batch="images on one rank"),
    _case("cp2-weight-shards-tied-language", lora=replace(EVERY, target_modules=LANGUAGE), cp=2, tied=True,
          sharding="optim_grads_params"),
    _case("tp2-pp2-sp-mixed", (3, 1), (0, 4), ONLY_LANGUAGE, tp=2, sequence_parallel=True),
    _case("cp2-pp2-frozen-vision", (3, 1), (0, 4), cp=2, freeze=("vision", "projector")),
    _case("whole-tp2-sp-few-tokens", tp=2, whole_encoder=True, sequence_parallel=True, **FEW_TOKENS),
    _case("whole-tp2-pp2", (3, 1), (0, 4), tp=2, whole_encoder=True),
    _case("together-whole-tp2-sp-few-tokens", tp=2, whole_encoder=True, encoder_batch=3, sequence_parallel=True,
          **FEW_TOKENS),
    _case("whole-tp2-dp2-distributed-optimizer", tp=2, dp=2, whole_encoder=True, sharding="optim"),
)
"""Compared with PEFT."""


MATRIX = tuple(LoraCase(case, EVERY) for case in LAYOUTS if case.name.endswith("-all"))
"""Adapters with every strategy and every way to have replicas; as ``tests.parallel.cases.MATRIX``."""


def _dropped(name: str, vision: Any = (4,), language: Any = (4,), **others: Any) -> LoraCase:
    """All have the same samples, so few tokens that a context-parallel rank is left without any of them."""
    grids, text_tokens = ((), ((1, 4, 6),), (), ((1, 8, 4), (1, 2, 4))), (1, 1, 9, 14)
    return _case(f"dropout-{name}", vision, language, DROPPED, grids=grids, text_tokens=text_tokens, **others)


DROPOUT_CASES = (
    _dropped("tp1"),
    _dropped("tp1-one-sample", micro_batch_size=1),
    _dropped("tp1-recompute", recompute="uniform", offload=4),
    _dropped("tp2-sp", tp=2, sequence_parallel=True),
    _dropped("ring2", cp=2, ring=True, micro_batch_size=1),
    _dropped("pp2-vpp2", **VPP),
    _dropped("dp2", dp=2),
    _dropped("tp2-cp2-sp", tp=2, cp=2, sequence_parallel=True, micro_batch_size=1),
    _dropped("together-whole-tp2-sp", tp=2, whole_encoder=True, encoder_batch=3, sequence_parallel=True,
             micro_batch_size=1),
    _dropped("whole-tp2-cp2-sp", tp=2, cp=2, whole_encoder=True, sequence_parallel=True, micro_batch_size=1),
)
"""Compared with each other."""
