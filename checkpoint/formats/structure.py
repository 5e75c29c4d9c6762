"""The two ways in which files keep the weights of one model: fused as the trainer holds them, or canonical.

MindSpeed-MM's canonical structure (``enable_canonical_hf_struct``) keeps q, k, v and gate, up apart, and the ViT's qkv
in Hugging Face's order; the rest is as in the fused one.  Pure: says what the stored tensors are, not where.
"""

from dataclasses import replace
from enum import Enum

from mm.weights.table import Fusion, Weight

_SEPARATE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


class Structure(Enum):
    """How the weights of a directory are kept."""

    FUSED = "fused"
    CANONICAL = "canonical"


def stored_weights(weight: Weight, structure: Structure) -> tuple[Weight, ...]:
    """The tensors as which ``weight`` is kept, in the order of its Hugging Face tensors.

    Each is a ``Weight`` of its own, which the functions of ``mm.weights.table`` cut like any other.  The ViT's qkv is
    cut within each of its three parts, so that a rank's shard is [Q; K; V] of its own heads.
    """
    if structure is Structure.FUSED or weight.fusion is Fusion.COPY:
        return (weight,)
    if weight.fusion is Fusion.PER_HEAD_QKV:
        return (replace(weight, fusion=Fusion.STACKED_QKV),)
    place, _, kind = weight.name.rsplit(".", 2)
    parts = []
    for hf_name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
        name = f"{place}.{hf_name.split('.')[-2]}.{kind}"
        parts.append(replace(weight, name=name, hf_names=(hf_name,), hf_shapes=(shape,), fusion=Fusion.COPY,
                             shape=shape, head_dim=0))
    return tuple(parts)


def is_canonical_name(name: str) -> bool:
    """Whether a stored tensor of this name is found in the canonical structure only."""
    return name.split(".")[-2:-1] != [] and name.split(".")[-2] in _SEPARATE
