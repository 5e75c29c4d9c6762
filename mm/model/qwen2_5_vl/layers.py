"""The transformer layer of both towers, built on megatron-core's tensor-parallel linear layers.

Rows are packed tokens or patches, [rows, hidden]; there is no batch dimension.  Module names are MindSpeed-MM's.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mm.config.model import Tower
from mm.device.pointwise import biased
from mm.model.layers.attention import AttentionInputs
from mm.model.layers.layer_context import LayerContext
from mm.model.layers.lora_linear import NO_KEYS, RowKeys
from mm.model.layers.norm import Residual, RMSNorm
from mm.model.parallel.sharded_rows import ShardedRows
from mm.model.recompute import Keep, LayerActivations, LinearInput, Remade, apply_linear, keep_here, recomputing
from mm.weights.shard import memory_ffn


class SelfAttention(nn.Module):
    """Fused qkv per query group [q ... q, k, v], rope, attention within segments, output projection."""

    def __init__(self, tower: Tower, context: LayerContext, bias: bool) -> None:
        super().__init__()
        self.head_dim = tower.head_dim
        num_heads, num_groups = tower.num_attention_heads, tower.num_query_groups
        self.num_groups, self.heads_per_group = num_groups // context.tp_size, num_heads // num_groups
        self.attention, self.rope = context.device.kernels.attention, context.device.kernels.rope
        qkv_size = (num_heads + 2 * num_groups) * self.head_dim
        self.linear_qkv = context.column(tower.hidden_size, qkv_size, bias=True)
        self.linear_proj = context.row(num_heads * self.head_dim, tower.hidden_size, bias)

    def forward(self, x: LinearInput, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        """What is added to the residual stream, in the form that ``RowLinear`` returns."""
        qkv, bias = apply_linear(self.linear_qkv, x, inputs.sharded, inputs.keys.shard)
        qkv = qkv.view(-1, self.num_groups, self.heads_per_group + 2, self.head_dim)
        q, k, v = self.rope(qkv, inputs.cos, inputs.sin, bias)
        attention = self.attention if inputs.across is None else partial(inputs.across.attend, self.attention)
        out = attention(q, k, v, inputs.segments, inputs.causal)
        return self.linear_proj(out.flatten(1), inputs.sharded, inputs.keys.ordered)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up fused as [gate; up]; zero-padded columns give zeros."""

    def __init__(self, tower: Tower, context: LayerContext, bias: bool) -> None:
        super().__init__()
        ffn = memory_ffn(tower.ffn_hidden_size, context.tp_size)
        self.swiglu = context.device.kernels.swiglu
        self.recomputes = tower.recompute.recomputes("mlp_act")
        self.linear_fc1 = context.column(tower.hidden_size, 2 * ffn, bias)
        self.linear_fc2 = context.row(ffn, tower.hidden_size, bias)

    def forward(
        self, x: LinearInput, sharded: ShardedRows | None, keys: RowKeys = NO_KEYS, keep: Keep = keep_here
    ) -> tuple[Tensor, Tensor | None]:
        """What is added to the residual stream, in the form that ``RowLinear`` returns."""
        gate_up, bias = apply_linear(self.linear_fc1, x, sharded, keys.shard)
        hidden = self.swiglu(gate_up, bias)
        if self.recomputes:
            hidden = Remade(hidden, self.swiglu, gate_up, keep)
        return apply_linear(self.linear_fc2, hidden, sharded, keys.whole)


class TransformerLayer(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, tower: Tower, context: LayerContext, bias: bool) -> None:
        super().__init__()
        self.input_layernorm = context.norm(tower.hidden_size, tower.layernorm_epsilon)
        self.self_attention = SelfAttention(tower, context, bias)
        self.pre_mlp_layernorm = context.norm(tower.hidden_size, tower.layernorm_epsilon)
        self.mlp = GatedMLP(tower, context, bias)
        self.recomputes_norms = tower.recompute.recomputes("layernorm")
        self.recomputes_mlp = tower.recompute.recomputes("mlp")

    def forward(self, x: Residual, inputs: AttentionInputs, keep: Keep = keep_here) -> Residual:
        """Each sublayer's output is added by the norm that follows; the MLP's by the next layer's first norm.

        ``keep``: keeps what outputs are recomputed from.
        """
        rows, normed = self._normed(self.input_layernorm, x, self.self_attention.linear_proj.bias, keep)
        x = Residual(rows, *self.self_attention(normed, inputs))
        sharded = None if inputs.sharded is None else inputs.sharded.unordered
        if self.recomputes_mlp:
            rows = x.total()
            added = recomputing((self.pre_mlp_layernorm, self.mlp), self._mlp, rows, sharded, inputs.keys)
            return Residual(biased(rows, self.mlp.linear_fc2.bias), *added)
        rows, normed = self._normed(self.pre_mlp_layernorm, x, self.mlp.linear_fc2.bias, keep)
        return Residual(rows, *self.mlp(normed, sharded, inputs.keys, keep))

    def _mlp(self, x: Tensor, sharded: ShardedRows | None, keys: RowKeys) -> tuple[Tensor, Tensor | None]:
        return self.mlp(self.pre_mlp_layernorm(Residual(x))[1], sharded, keys)

    def _normed(
        self, norm: RMSNorm, x: Residual, next_bias: Tensor | None, keep: Keep
    ) -> tuple[Tensor, LinearInput]:
        total, normed = norm(x, next_bias)
        return total, Remade(normed, norm.again, total, keep) if self.recomputes_norms else normed


class LayerStack(nn.Module):
    """Consecutive layers under their global numbers.

    ``RecomputeConfig`` says which are recomputed in the backward pass, and ``OffloadConfig`` which keep their
    activations in host memory.  A layer through which no gradient flows is computed only once, and keeps nothing.
    """

    final_layernorm: RMSNorm
    """After the LLM's last layer; on the stage that has the head."""

    def __init__(
        self, layers: range, tower: Tower, context: LayerContext, bias: bool, *, is_before_head: bool = False
    ) -> None:
        """``bias``: of every linear layer but qkv, which always has one.  ``is_before_head``: the head follows."""
        super().__init__()
        self.layers = nn.ModuleDict({
            str(layer): context.built(TransformerLayer(tower, context, bias)) for layer in layers})
        self.recomputed = frozenset(map(str, tower.recompute.whole_layers(layers)))
        self.numbers = {layer: number for number, layer in enumerate(self.layers)}
        self.host = context.host
        self.num_offloaded = len(tower.offload.layers(layers, is_before_head=is_before_head))
        self.before: LayerActivations | None = None
        """Activations of the previous layer in the current forward pass."""

    def run(self, layer: str, x: Residual, inputs: AttentionInputs) -> Residual:
        """Apply the layer with this global number."""
        if inputs.caches is not None:
            inputs = replace(inputs, across=inputs.caches[layer])
        number = self.numbers[layer]
        if self.host is None or number > self.num_offloaded or not torch.is_grad_enabled():
            return self._applied(layer, x, inputs, keep_here)
        # a message stays here anyway: the schedule holds it until its gradient is sent
        shared = (inputs.cos, inputs.sin, *([x.rows] if number == 0 and x.rows.is_leaf else []))
        with self.host.layer(self.before if number else None, number < self.num_offloaded, shared) as own:
            x = self._applied(layer, x, inputs, own.keep)
        self.before = own if number + 1 < len(self.layers) else None
        return x

    def _applied(self, layer: str, x: Residual, inputs: AttentionInputs, keep: Keep) -> Residual:
        module = self.layers[layer]
        if layer not in self.recomputed:
            return module(x, inputs, keep)
        return Residual(recomputing((module,), lambda rows: module(Residual(rows), inputs).total(), x.total()))
