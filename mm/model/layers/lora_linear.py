"""Adapters of linear layers: y += scale x B(A(dropout(x))), each sharded like its layer.

Column-parallel layer: B's outputs are sharded; A is replicated and computes the hidden elements of this rank's rows.
Row-parallel layer: A's inputs are sharded; the hidden elements are summed over ranks before B, which is replicated.
So ranks exchange only ``rank`` elements per row, and gradients are reduced like those of the model's own weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor, nn

from mm.device.kernels import Accumulate
from mm.model.layers.dropout import Dropout, seed_of
from mm.model.layers.layer_context import LayerContext
from mm.model.layers.linear import linear
from mm.model.parallel.sharded_rows import CutRows, reduce_rows
from mm.parallel.zero.gradient_buffers import gradient_from, take_buffer
from mm.weights.shard import memory_shape
from mm.weights.table import Fusion, Weight, local_shape
from mm.weights.trained import layer_weight, matrix_pairs


class _DroppedLinear(torch.autograd.Function):
    """dropout(x) W^T, which keeps only x and repeats the dropout in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, accumulate: Accumulate, dropout: Dropout) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.accumulate, ctx.dropout = weight, accumulate, dropout
        return torch.nn.functional.linear(dropout(x), weight.flatten(1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x_gradient = ctx.dropout(gradient @ ctx.weight.flatten(1)) if ctx.needs_input_grad[0] else None
        buffer, is_stale = take_buffer(ctx.weight)
        ctx.accumulate(buffer.flatten(1), gradient, ctx.dropout(x), is_stale)
        return x_gradient, gradient_from(buffer, ctx.weight), None, None


class Matrix(nn.Module):
    """A or B, as this rank holds it.

    It computes its product itself: megatron's overlapped gathering waits for a weight when its module is called.
    """

    def __init__(self, weight: Weight, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(*memory_shape(weight, context.tp_size))
        self.accumulate = context.device.kernels.accumulate

    def forward(
        self, x: Tensor, group: dist.ProcessGroup | None = None, cut: CutRows | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """dropout(x) W^T; for ``group`` and ``cut`` see ``linear``."""
        if dropout is None:
            return linear(x, self.weight, None, self.accumulate, group, cut)
        assert group is None and cut is None, "only A has dropout, and A takes the rows as they are"
        return _DroppedLinear.apply(x, self.weight, self.accumulate, dropout)


class Adapter(nn.Module):
    """The two matrices beside one linear layer of Hugging Face's model."""

    def __init__(self, a: Weight, b: Weight, base: Weight, probability: float, context: LayerContext) -> None:
        super().__init__()
        assert a.scale is not None, "an adapter's matrix"
        self.lora_A, self.lora_B = Matrix(a, context), Matrix(b, context)
        self.scale, self.probability, self.salt = a.scale, probability, seed_of(a.hf_names[0])
        self.tp_group = context.tp_group if context.tp_size > 1 else None
        self.first_column = 0 if a.tp_dim is None else local_shape(a, context.tp_size)[1] * context.tp_group.rank()
        self.place = _place(base.hf_names.index(layer_weight(b)), base, context.tp_size)

    def _hidden(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """[rows, inputs] -> [rows, rank]"""
        dropout = None
        if keys is not None and self.probability > 0.0:
            dropout = Dropout(self.probability, keys, self.salt, self.first_column)
        return self.lora_A(x, dropout=dropout) * self.scale

    def add_to(self, y: Tensor, x: Tensor, keys: Tensor | None) -> Tensor:
        """Add the adapter's part to ``y``, the layer's output for ``x``; the layer is whole on every rank."""
        return y + self.lora_B(self._hidden(x, keys))

    def add_to_outputs(self, y: Tensor, x: Tensor, cut: CutRows | None, keys: Tensor | None) -> Tensor:
        """The same for a column-parallel layer: ``y`` has this rank's outputs for all rows, and is changed in place."""
        added = self.lora_B(self._hidden(x, keys), self.tp_group, cut)
        shape, places = self.place
        y.view(len(y), *shape)[:, :, places].add_(added.view(len(y), shape[0], places.stop - places.start, shape[2]))
        return y

    def add_to_sum(self, y: Tensor, x: Tensor, cut: CutRows | None, keys: Tensor | None) -> Tensor:
        """The same for a row-parallel layer: ``y`` is whole, or a piece of ``cut``."""
        hidden = self._hidden(x, keys)
        if self.tp_group is not None:
            hidden = reduce_from_tensor_model_parallel_region(hidden, self.tp_group) if cut is None else (
                reduce_rows(hidden, cut))
        return y + self.lora_B(hidden)


def _place(number: int, base: Weight, tp_size: int) -> tuple[tuple[int, int, int], slice]:
    """Where the outputs of Hugging Face's tensor ``number`` of a fused weight lie on a rank: [blocks, parts, width] and
    which parts."""
    size = memory_shape(base, tp_size)[0]
    if base.fusion is Fusion.GATE_UP:
        return (1, 2, size // 2), slice(number, number + 1)
    if base.fusion is Fusion.GROUPED_QKV:
        num_heads = [shape[0] // (base.num_units * base.head_dim) for shape in base.hf_shapes]
        first = sum(num_heads[:number])
        return (base.num_units // tp_size, sum(num_heads), base.head_dim), slice(first, first + num_heads[number])
    return (1, 1, size), slice(0, 1)


def attach(chunk: nn.Module, weights: Sequence[Weight], probability: float, context: LayerContext) -> None:
    """Give the linear layers of ``chunk`` the adapters among ``weights``, under the names of the table."""
    alone = context.alone
    for base, a, b in matrix_pairs(weights):
        path = base.name.removesuffix(".weight")
        layer: Any = chunk.get_submodule(path)
        adapter = Adapter(a, b, base, probability, alone if base.is_whole else context)
        layer.add_module(a.name.removeprefix(f"{path}.").partition(".")[0], adapter)
        layer.adapters = (*layer.adapters, adapter)
