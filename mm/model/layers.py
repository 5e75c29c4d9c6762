"""The transformer layer that both towers are made of, over megatron-core's tensor-parallel linear layers.

Rows are packed tokens or patches, [rows, hidden]; there is no batch dimension.  Module names are MindSpeed-MM's.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mm.config.model import LanguageConfig, VisionConfig
from mm.device.attention import Segments
from mm.device.device import Device
from mm.device.pointwise import biased
from mm.model.cache import LayerCache
from mm.model.cut_rows import CutRows
from mm.model.dropout import NO_KEYS, RowKeys
from mm.model.exchange import Ulysses
from mm.model.linear import ColumnLinear, RowLinear
from mm.model.norm import Residual, RMSNorm
from mm.model.ring import Ring
from mm.weights.memory import memory_ffn

Tower = VisionConfig | LanguageConfig
"""Both have the settings that a layer reads, under the same names."""


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

    def norm(self, hidden_size: int, epsilon: float) -> RMSNorm:
        return RMSNorm(self.empty(hidden_size), epsilon, self.device.kernels)

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter of the shape that this rank holds; its values come from ``mm.model.load``."""
        return nn.Parameter(torch.empty(shape, dtype=self.parallel.params_dtype, device=self.device.torch_device))


def never_initialize(_: Tensor) -> None:
    raise AssertionError("weights are loaded or drawn by mm.model.load, never initialised by a layer")


@dataclass(frozen=True)
class Remade:
    """The input of a linear layer that is recomputed for the weight's gradient instead of being kept."""

    made: Tensor
    again: Callable[[], Tensor]


LinearInput = Tensor | Remade


def apply_linear(
    linear: nn.Module, x: LinearInput, cut: CutRows | None = None, keys: Tensor | None = None
) -> Any:
    """Apply ``linear`` to ``x``; if ``x`` is ``Remade``, autograd keeps the function ``again`` instead of the tensor.

    Saved tensors are matched by address and shape.  A saved view of ``made`` with that shape but other strides or dtype
    would match too, and backward would get the wrong tensor.  A saved copy would not match, and would stay in memory.
    Our linear layers save neither.
    """
    if isinstance(x, Tensor):
        return linear(x, cut, keys)
    made, again = x.made, x.again
    address = made.data_ptr(), made.shape

    def forget(kept: Tensor) -> Tensor | Callable[[], Tensor]:
        """Other saved tensors are kept as they are: adapters save their few hidden numbers per row."""
        return again if (kept.data_ptr(), kept.shape) == address else kept

    with torch.autograd.graph.saved_tensors_hooks(forget, lambda kept: kept if isinstance(kept, Tensor) else kept()):
        return linear(made, cut, keys)


@dataclass(frozen=True)
class AttentionInputs:
    """What an attention layer needs besides its rows."""

    cos: Tensor
    """[rows, head_dim]; its dtype is the one rope computes in."""
    sin: Tensor
    segments: Segments
    causal: bool
    cut: CutRows | None = None
    """Under sequence parallelism, a layer's input and output are pieces of the rows; its attention sees all rows, in
    the order of ``segments``.  None: each rank has all rows, in that order."""
    across: Ulysses | Ring | LayerCache | None = None
    """How attention sees tokens beyond this rank's rows: other ranks' under context parallelism (``segments`` then
    describe the tokens of all ranks), or earlier tokens when a layer caches keys and values."""
    caches: Mapping[str, LayerCache] | None = None
    """Each layer's keys and values, by its global number, during generation."""
    keys: RowKeys = NO_KEYS
    """Keys of the rows, for the adapters' dropout."""


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
        """What is added to the residual stream, as ``RowLinear`` gives it."""
        qkv, bias = apply_linear(self.linear_qkv, x, inputs.cut, inputs.keys.piece)
        qkv = qkv.view(-1, self.num_groups, self.heads_per_group + 2, self.head_dim)
        q, k, v = self.rope(qkv, inputs.cos, inputs.sin, bias)
        attention = self.attention if inputs.across is None else partial(inputs.across.attend, self.attention)
        out = attention(q, k, v, inputs.segments, inputs.causal)
        return self.linear_proj(out.flatten(1), inputs.cut, inputs.keys.ordered)


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
        self, x: LinearInput, cut: CutRows | None, keys: RowKeys = NO_KEYS
    ) -> tuple[Tensor, Tensor | None]:
        """What is added to the residual stream, as ``RowLinear`` gives it."""
        gate_up, bias = apply_linear(self.linear_fc1, x, cut, keys.piece)
        hidden = self.swiglu(gate_up, bias)
        if self.recomputes:
            hidden = Remade(hidden, partial(self.swiglu, gate_up))
        return apply_linear(self.linear_fc2, hidden, cut, keys.whole)


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

    def forward(self, x: Residual, inputs: AttentionInputs) -> Residual:
        """Each sublayer's output is added by the norm that follows; the MLP's by the next layer's first norm."""
        rows, normed = self._normed(self.input_layernorm, x, self.self_attention.linear_proj.bias)
        x = Residual(rows, *self.self_attention(normed, inputs))
        cut = None if inputs.cut is None else inputs.cut.unordered
        if self.recomputes_mlp:
            rows = x.total()
            added = recomputing((self.pre_mlp_layernorm, self.mlp), self._mlp, rows, cut, inputs.keys)
            return Residual(biased(rows, self.mlp.linear_fc2.bias), *added)
        rows, normed = self._normed(self.pre_mlp_layernorm, x, self.mlp.linear_fc2.bias)
        return Residual(rows, *self.mlp(normed, cut, inputs.keys))

    def _mlp(self, x: Tensor, cut: CutRows | None, keys: RowKeys) -> tuple[Tensor, Tensor | None]:
        return self.mlp(self.pre_mlp_layernorm(Residual(x))[1], cut, keys)

    def _normed(self, norm: RMSNorm, x: Residual, next_bias: Tensor | None) -> tuple[Tensor, LinearInput]:
        total, normed = norm(x, next_bias)
        return total, Remade(normed, partial(norm.again, total)) if self.recomputes_norms else normed


def recomputing(modules: Iterable[nn.Module], function: Callable[..., Any], x: Tensor, *others: Any) -> Any:
    """``function(x, *others)``, keeping only its arguments and calling it again in the backward pass.

    ``modules``: those that it uses.  If neither they nor ``x`` need a gradient, nothing is kept and it is just called.
    """
    is_trained = any(parameter.requires_grad for module in modules for parameter in module.parameters())
    if torch.is_grad_enabled() and (x.requires_grad or is_trained):
        return checkpoint(function, x, *others, use_reentrant=False, preserve_rng_state=False)
    return function(x, *others)


class LayerStack(nn.Module):
    """Consecutive layers under their global numbers, some of them recomputed in the backward pass.

    ``RecomputeConfig`` says which.  A layer through which no gradient flows is computed only once.
    """

    final_layernorm: RMSNorm
    """After the LLM's last layer; on the stage that has the head."""

    def __init__(self, layers: range, tower: Tower, context: LayerContext, bias: bool) -> None:
        """``bias``: of every linear layer but qkv, which always has one."""
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): TransformerLayer(tower, context, bias) for layer in layers})
        self.recomputed = frozenset(map(str, tower.recompute.whole_layers(layers)))

    def run(self, layer: str, x: Residual, inputs: AttentionInputs) -> Residual:
        """Apply the layer with this global number."""
        module = self.layers[layer]
        if inputs.caches is not None:
            inputs = replace(inputs, across=inputs.caches[layer])
        if layer not in self.recomputed:
            return module(x, inputs)
        return Residual(recomputing((module,), lambda rows: module(Residual(rows), inputs).total(), x.total()))
