"""The transformer layer that both towers are made of, over megatron-core's tensor-parallel linear layers.

Rows are packed tokens or patches, [rows, hidden]; there is no batch dimension.  Module names are MindSpeed-MM's.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mm.config.model import LanguageConfig, VisionConfig
from mm.device.attention import Segments
from mm.device.device import Device
from mm.model.linear import ColumnLinear, RowLinear
from mm.model.rope import apply_rope
from mm.weights.memory import memory_ffn

Tower = VisionConfig | LanguageConfig
"""What a layer reads of its settings has the same name in both."""


@dataclass(frozen=True)
class LayerContext:
    """What every layer is built with: megatron's parallel settings, the tensor-parallel group and the device."""

    parallel: TransformerConfig
    tp_group: dist.ProcessGroup
    device: Device

    @property
    def tp_size(self) -> int:
        return self.tp_group.size()

    def column(self, input_size: int, output_size: int, bias: bool) -> ColumnLinear:
        """A linear layer whose outputs are cut over tensor parallelism."""
        return ColumnLinear(
            input_size,
            output_size,
            self.device.kernels.accumulate,
            config=self.parallel,
            init_method=never_initialize,
            bias=bias,
            gather_output=False,
            tp_group=self.tp_group,
        )

    def row(self, input_size: int, output_size: int, bias: bool) -> RowLinear:
        """A linear layer whose inputs are cut over tensor parallelism; its output is whole on every rank."""
        return RowLinear(
            input_size,
            output_size,
            self.device.kernels.accumulate,
            config=self.parallel,
            init_method=never_initialize,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=self.tp_group,
        )

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter of the shape that this rank holds; its values come from ``mm.model.load``."""
        return nn.Parameter(torch.empty(shape, dtype=self.parallel.params_dtype, device=self.device.torch_device))


def never_initialize(_: Tensor) -> None:
    raise AssertionError("weights are loaded or drawn by mm.model.load, never initialised by a layer")


class RMSNorm(nn.Module):
    """Root-mean-square norm with statistics in fp32."""

    def __init__(self, hidden_size: int, epsilon: float, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(hidden_size)
        self.epsilon = epsilon
        self.kernel = context.device.kernels.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x, self.weight, self.epsilon)


@dataclass(frozen=True)
class AttentionInputs:
    """What an attention layer needs beside its rows."""

    cos: Tensor
    """[rows, head_dim]; its dtype is the one rope computes in."""
    sin: Tensor
    segments: Segments
    causal: bool


class SelfAttention(nn.Module):
    """Fused qkv per query group [q ... q, k, v], rope, variable-length attention, output projection."""

    def __init__(self, tower: Tower, context: LayerContext, bias: bool) -> None:
        super().__init__()
        self.head_dim = tower.head_dim
        num_heads, num_groups = tower.num_attention_heads, tower.num_query_groups
        self.num_groups, self.heads_per_group = num_groups // context.tp_size, num_heads // num_groups
        self.attention = context.device.kernels.attention
        qkv_size = (num_heads + 2 * num_groups) * self.head_dim
        self.linear_qkv = context.column(tower.hidden_size, qkv_size, bias=True)
        self.linear_proj = context.row(num_heads * self.head_dim, tower.hidden_size, bias)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        num_rows = x.shape[0]
        qkv = self.linear_qkv(x).view(num_rows, self.num_groups, self.heads_per_group + 2, self.head_dim)
        q, k, v = qkv.split((self.heads_per_group, 1, 1), dim=2)
        q = apply_rope(q.reshape(num_rows, -1, self.head_dim), inputs.cos, inputs.sin)
        k = apply_rope(k.squeeze(2), inputs.cos, inputs.sin)
        out = self.attention(q, k, v.squeeze(2), inputs.segments, inputs.causal)
        return self.linear_proj(out.reshape(num_rows, -1))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up fused as [gate; up]; zero-padded columns give zeros."""

    def __init__(self, tower: Tower, context: LayerContext, bias: bool) -> None:
        super().__init__()
        ffn = memory_ffn(tower.ffn_hidden_size, context.tp_size)
        self.swiglu = context.device.kernels.swiglu
        self.linear_fc1 = context.column(tower.hidden_size, 2 * ffn, bias)
        self.linear_fc2 = context.row(ffn, tower.hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(self.swiglu(self.linear_fc1(x)))


class TransformerLayer(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, tower: Tower, context: LayerContext, bias: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(tower.hidden_size, tower.layernorm_epsilon, context)
        self.self_attention = SelfAttention(tower, context, bias)
        self.pre_mlp_layernorm = RMSNorm(tower.hidden_size, tower.layernorm_epsilon, context)
        self.mlp = GatedMLP(tower, context, bias)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x), inputs)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class LayerStack(nn.Module):
    """Layers that follow each other under their global numbers, recomputing as many as asked in the backward pass.

    "selective" recomputes attention scores, which our kernels never keep.  "full" with method "uniform" recomputes all
    of a stage's layers, with "block" the first ``num_layers`` of them, as in Megatron.
    """

    final_layernorm: RMSNorm
    """After the LLM's last layer; on the stage that has the head."""

    def __init__(self, layers: range, tower: Tower, context: LayerContext, bias: bool) -> None:
        """``bias``: of every linear layer but qkv, which always has one."""
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): TransformerLayer(tower, context, bias) for layer in layers})
        recompute = tower.recompute
        num_recomputed = recompute.num_layers if recompute.method == "block" else None
        recomputed = layers[:num_recomputed] if recompute.granularity == "full" else ()
        self.recomputed = frozenset(map(str, recomputed))

    def run(self, layer: str, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """Apply the layer with this global number."""
        module = self.layers[layer]
        if layer in self.recomputed and torch.is_grad_enabled():
            return checkpoint(module, x, inputs, use_reentrant=False, preserve_rng_state=False)
        return module(x, inputs)
