"""The MLP of a layer, with a gate."""

from torch import Tensor, nn

from mm.config.model import Tower
from mm.model.cut_rows import CutRows
from mm.model.dropout import NO_KEYS, RowKeys
from mm.model.host_activations import Keep, keep_here
from mm.model.layer_context import LayerContext
from mm.model.recompute import LinearInput, Remade, apply_linear
from mm.weights.memory import memory_ffn


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
        self, x: LinearInput, cut: CutRows | None, keys: RowKeys = NO_KEYS, keep: Keep = keep_here
    ) -> tuple[Tensor, Tensor | None]:
        """What is added to the residual stream, in the form that ``RowLinear`` returns."""
        gate_up, bias = apply_linear(self.linear_fc1, x, cut, keys.piece)
        hidden = self.swiglu(gate_up, bias)
        if self.recomputes:
            hidden = Remade(hidden, self.swiglu, gate_up, keep)
        return apply_linear(self.linear_fc2, hidden, cut, keys.whole)
