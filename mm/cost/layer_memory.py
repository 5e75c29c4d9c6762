"""The memory of one layer: its parameters, what its forward pass keeps, and what it needs while it runs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from mm.config.layers import RecomputeConfig
from mm.config.model import ModelConfig, Tower
from mm.weights.shard import memory_shape
from mm.weights.table import Fusion, Place, Weight, weights_by_place
from mm.weights.trained import GradientPath, is_frozen, matrix_pairs

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element of weights and activations, by precision."""
FP32, INT64 = 4, 8


@dataclass(frozen=True)
class Keeps:
    """Which tensors a layer keeps from its forward pass for the backward pass."""

    input: bool = False
    """The layer's input, for full recompute; then nothing else is kept."""
    num_residuals: int = 0
    """Inputs of norms."""
    num_norm_outputs: int = 0
    attention: bool = False
    swiglu_input: bool = False
    swiglu_output: bool = False
    adapter_numbers: int = 0
    """Hidden elements of adapters per row: the sum of their ranks."""

    @property
    def keeps_input(self) -> bool:
        """Whether the layer's input is kept, by itself or as the input of the first norm."""
        return self.input or self.num_residuals == 2


NOTHING, INPUT = Keeps(), Keeps(input=True)
ALL = Keeps(False, 2, 2, True, True, True)
"""Everything that the gradients of a trained layer need."""


def trained_layers(weights: Sequence[Weight], model: ModelConfig) -> tuple[list[bool], list[int], list[int]]:
    """Whether each base weight or its adapter is trained, the indices of linear layers, and their adapters' ranks."""
    base_weights = [weight for weight in weights if not weight.is_adapter]
    ranks = dict.fromkeys((weight.name for weight in base_weights), 0)
    for base, a, _ in matrix_pairs(weights):
        ranks[base.name] += a.shape[0]
    linear = [index for index, weight in enumerate(base_weights) if len(weight.shape) > 1]
    trained = [ranks[weight.name] > 0 or not is_frozen(weight, model) for weight in base_weights]
    return trained, linear, [ranks[base_weights[index].name] for index in linear]


def layer_keeps(weights: Sequence[Weight], model: ModelConfig, passes: bool, recompute: RecomputeConfig) -> Keeps:
    """What one layer keeps, given its ``weights`` in model order.  ``passes``: the layer's input needs a gradient.

    Two conditions matter.  A linear layer that is *trained* (itself or an adapter) keeps its input.  A gradient that is
    *needed* before an operation (``needs_gradient``: the layer's input or an earlier weight needs one) makes the
    operation keep its operands.

    - residuals (inputs of norms): if needed before the next linear layer, or if the norm's output or the MLP is
      recomputed
    - norm outputs: if the next linear layer is trained, unless recomputed
    - attention: if needed before or in qkv
    - SwiGLU's input: if needed before fc2, or if its output is recomputed for a trained fc2; not if the MLP is
      recomputed
    - SwiGLU's output: if fc2 is trained, unless recomputed
    """
    trained, (qkv, _, fc1, fc2), ranks = trained_layers(weights, model)

    def needs_gradient(stop: int) -> bool:
        return passes or any(trained[:stop])

    if not needs_gradient(len(trained)):
        return NOTHING
    norms, mlp, mlp_act = map(recompute.recomputes, ("layernorm", "mlp", "mlp_act"))
    return Keeps(
        num_residuals=((needs_gradient(qkv) or (norms and trained[qkv]))
                       + (mlp or needs_gradient(fc1) or (norms and trained[fc1]))),
        num_norm_outputs=(trained[qkv] and not norms) + (trained[fc1] and not (norms or mlp)),
        attention=needs_gradient(qkv + 1),
        swiglu_input=not mlp and (needs_gradient(fc2) or (mlp_act and trained[fc2])),
        swiglu_output=trained[fc2] and not (mlp or mlp_act),
        adapter_numbers=sum(ranks[:2] if mlp else ranks),
    )


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per row of each tensor that a layer's forward pass creates and its backward pass reads."""

    input: int
    residuals: int
    """Inputs of both norms, and the norms' scale factors."""
    norm_outputs: int
    attention: int
    """q, k, v, the output and the log-sum-exp."""
    swiglu_input: int
    swiglu_output: int
    gathered: int
    """All rows of a linear layer's input, gathered under sequence parallelism."""
    adapter_number: int
    """One hidden element of an adapter."""

    def kept(self, keeps: Keeps) -> int:
        norms = keeps.num_residuals * self.residuals + keeps.num_norm_outputs * self.norm_outputs
        swiglu = keeps.swiglu_input * self.swiglu_input + keeps.swiglu_output * self.swiglu_output
        hidden = keeps.adapter_numbers * self.adapter_number
        return keeps.input * self.input + norms // 2 + keeps.attention * self.attention + swiglu + hidden

    def working(self, keeps: Keeps) -> int:
        """Bytes per row needed while the layer runs, besides what is kept.

        Most is needed in SwiGLU's backward pass: the gradients of the layer's input and of SwiGLU's output and input,
        and, where that pass is not one kernel, an intermediate in the place of SwiGLU's output.  Unless SwiGLU's input
        is kept, the layer's other activations are there too.
        """
        activations = 0
        if not keeps.swiglu_input:
            activations = self.kept(replace(ALL, adapter_numbers=keeps.adapter_numbers)) - self.kept(keeps)
        gradients = 0 if keeps == NOTHING else self.input + self.swiglu_input + self.swiglu_output
        intermediate = 0 if keeps == NOTHING or keeps.swiglu_output else self.swiglu_output
        return activations + gradients + intermediate + self.gathered


def layer_bytes(
    tower: Tower, local_ffn: int, tp_size: int, width: int, num_pieces: int = 1, ulysses_size: int = 1
) -> LayerBytes:
    """``local_ffn``: columns of one rank's SwiGLU output.  ``num_pieces``, ``ulysses_size``: see ``ChunkMemory``."""
    whole = tower.hidden_size * width
    hidden = whole // num_pieces
    q = tower.num_attention_heads * tower.head_dim // tp_size * width
    k = max(tower.num_query_groups // tp_size, ulysses_size) * tower.head_dim * width
    exchanged = q if ulysses_size > 1 else 0  # attention's output before and after the all-to-all
    return LayerBytes(
        input=hidden,
        residuals=2 * hidden + 2 * FP32 // num_pieces,
        norm_outputs=2 * hidden,
        attention=2 * (q + k) + exchanged + FP32 * tower.num_attention_heads // tp_size,
        swiglu_input=2 * local_ffn * width,
        swiglu_output=local_ffn * width,
        gathered=whole if num_pieces > 1 else 0,
        adapter_number=-(-width // num_pieces),
    )


def vision_division(model: ModelConfig, tp_size: int, num_pieces: int) -> tuple[int, int]:
    """``tp_size`` and ``num_pieces`` of the ViT and the projector."""
    return (1, 1) if model.encodes_whole else (tp_size, num_pieces)


@cache
def layer_memories(
    model: ModelConfig, place: Place, tp_size: int, width: int, num_pieces: int, ulysses_size: int
) -> Sequence[tuple[LayerBytes, Keeps]]:
    """For each layer of a tower: its ``layer_bytes``, and what it keeps if it is not recomputed as a whole."""
    tower: Tower = model.vision if place is Place.VISION_LAYER else model.language
    path, found = GradientPath.of(model), list[tuple[LayerBytes, Keeps]]()
    for layer in range(tower.num_layers):
        weights = weights_by_place(model)[place, layer]
        keeps = layer_keeps(weights, model, path.needs_input_gradient(place, layer), tower.recompute)
        fused = next(weight for weight in weights if weight.fusion is Fusion.GATE_UP)
        local_ffn = memory_shape(fused, tp_size)[0] // 2
        if place is Place.VISION_LAYER:  # context-parallel ranks encode whole images, so they exchange no heads
            own_tp_size, own_pieces = vision_division(model, tp_size, num_pieces)
            found.append((layer_bytes(tower, local_ffn, own_tp_size, width, own_pieces), keeps))
        else:
            found.append((layer_bytes(tower, local_ffn, tp_size, width, num_pieces, ulysses_size), keeps))
    return found


def kept_by_layers(
    tower: Tower, layers: range, known: Sequence[tuple[LayerBytes, Keeps]], *, is_before_head: bool
) -> Iterator[tuple[int, LayerBytes, Keeps, bool]]:
    """For each of a chunk's ``layers``: its number, its bytes, what it keeps, and whether that is offloaded."""
    whole, offloaded = tower.recompute.whole_layers(layers), tower.offload.layers(layers, is_before_head=is_before_head)
    for layer in layers:
        sizes, keeps = known[layer]
        yield layer, sizes, INPUT if keeps != NOTHING and layer in whole else keeps, layer in offloaded


@cache
def params_by_place(model: ModelConfig, tp_size: int) -> Mapping[tuple[Place, int | None], tuple[int, int, int]]:
    """``params_of`` of each block, by its place and layer."""
    return {place: params_of(weights, model, tp_size) for place, weights in weights_by_place(model).items()}


def params_of(weights: Sequence[Weight], model: ModelConfig, tp_size: int) -> tuple[int, int, int]:
    """Parameters on one rank, with padding: all, those trained, and those trained that belong to a whole encoder."""
    found = [(math.prod(memory_shape(weight, tp_size)), not is_frozen(weight, model), weight.is_whole)
             for weight in weights]
    return (sum(size for size, _, _ in found), sum(size for size, is_trained, _ in found if is_trained),
            sum(size for size, is_trained, is_whole in found if is_trained and is_whole))
