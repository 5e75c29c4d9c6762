"""Adapters of linear layers: y += scale x B(A(dropout(x))), each sharded like its layer; and their dropout.

Column-parallel layer: B's outputs are sharded; A is replicated and computes the hidden elements of this rank's rows.
Row-parallel layer: A's inputs are sharded; the hidden elements are summed over ranks before B, which is replicated.
So ranks exchange only ``rank`` elements per row, and gradients are reduced like those of the model's own weights.

What is dropped is a hash of the step, the sample, the position in it, the layer and the column.  So no layout changes
it, a recomputed layer drops the same elements, and no mask is kept for the backward pass.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mm.batch import Microbatch
from mm.device.kernels import Accumulate
from mm.device.pointwise import BITS, mixed
from mm.model.layers.layer_context import LayerContext
from mm.model.layers.linear import linear, sum_over_ranks
from mm.model.parallel.sharded_rows import ShardedRows
from mm.parallel.zero.gradient_buffers import gradient_from, take_buffer
from mm.weights.fuse import local_shape
from mm.weights.shard import memory_shape
from mm.weights.table import Fusion, Weight
from mm.weights.trained import layer_weight, matrix_pairs

_PLACES_AT_A_TIME = 1 << 22
"""Elements of a matrix hashed at once; each int64 intermediate takes 32 MiB."""


def seed_of(*words: object) -> int:
    """A 32-bit seed for a step or a layer."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, words)).encode()).digest()[:4], "little")


@dataclass(frozen=True)
class RowKeys:
    """A key for each row of a linear layer's input, int64 on the device; None: nothing is dropped.

    With sequence parallelism, rows 0 to 3, TP 2 and attention order 2 0 3 1, rank 0 has ``shard`` 0 1, ``whole``
    0 1 2 3 and ``ordered`` 2 0 3 1.
    """

    shard: Tensor | None = None
    """Keys of this rank's shard of the rows, for column-parallel layers; of all rows without sequence parallelism."""
    whole: Tensor | None = None
    """Keys of all rows in sequence-parallel order, for row-parallel layers."""
    ordered: Tensor | None = None
    """Keys of all rows in attention's order, for the projection that follows attention."""


NO_KEYS = RowKeys()


def token_keys(microbatch: Microbatch, seed: int) -> Tensor:
    """int64 [num_tokens], on the host: a key for each token, from its sample and its position there."""
    lengths = torch.tensor(microbatch.segment_lengths, dtype=torch.int64)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    positions = torch.arange(microbatch.num_tokens) - starts
    return mixed(_sample_keys(microbatch, seed).repeat_interleave(lengths) ^ mixed(positions))


def patch_keys(microbatch: Microbatch, images: tuple[int, ...], visual_token_ids: tuple[int, int], seed: int) -> Tensor:
    """int64 [patches of ``images``], on the host: a key for each patch in reading order, from its sample, the image's
    number in the sample and the position in the image."""
    counts = torch.tensor([math.prod(grid) for grid in microbatch.image_grids], dtype=torch.int64)
    places = torch.isin(microbatch.token_ids, torch.tensor(visual_token_ids)).nonzero().squeeze(1)
    per_token = int(counts.sum()) // len(places)
    ends = torch.tensor(microbatch.segment_lengths, dtype=torch.int64).cumsum(0)
    samples = torch.searchsorted(ends, places[(counts.cumsum(0) - counts) // per_token], right=True)
    numbers = torch.arange(len(samples)) - torch.searchsorted(samples, samples)  # of the image in its sample
    image_keys = mixed(_sample_keys(microbatch, seed + 1)[samples] ^ mixed(numbers))
    keys = [mixed(image_keys[image] ^ mixed(torch.arange(int(counts[image])))) for image in images]
    return torch.cat(keys) if keys else torch.empty(0, dtype=torch.int64)


def _sample_keys(microbatch: Microbatch, seed: int) -> Tensor:
    assert len(microbatch.samples) == len(microbatch.segment_lengths), "dropout needs to know which samples these are"
    return mixed(mixed(torch.tensor(microbatch.samples, dtype=torch.int64) & BITS) ^ (seed & BITS))


@dataclass(frozen=True, eq=False)
class Dropout:
    """One layer's dropout of a matrix; the same elements at every call."""

    probability: float
    rows: Tensor
    """int64 [rows]: keys of the rows."""
    salt: int
    first_column: int = 0
    """Index in the whole matrix of this rank's first column."""

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [rows, columns] with dropped elements zeroed and the rest scaled up, which preserves the mean."""
        columns = torch.arange(self.first_column, self.first_column + x.shape[1], device=x.device)
        column_keys, threshold = mixed(mixed(columns) ^ self.salt), int(self.probability * 2**32)
        result, step = torch.empty_like(x), max(1, _PLACES_AT_A_TIME // max(1, x.shape[1]))
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            is_kept = mixed(self.rows[rows, None] ^ column_keys) >= threshold
            torch.mul(x[rows], is_kept, out=result[rows])
        return result.mul_(1.0 / (1.0 - self.probability))


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
        self, x: Tensor, group: dist.ProcessGroup | None = None, sharded: ShardedRows | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """dropout(x) W^T; for ``group`` and ``sharded`` see ``linear``."""
        if dropout is None:
            return linear(x, self.weight, None, self.accumulate, group, sharded)
        assert group is None and sharded is None, "only A has dropout, and A takes the rows as they are"
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

    def add_to_outputs(self, y: Tensor, x: Tensor, sharded: ShardedRows | None, keys: Tensor | None) -> Tensor:
        """The same for a column-parallel layer: ``y`` has this rank's outputs for all rows, and is changed in place."""
        added = self.lora_B(self._hidden(x, keys), self.tp_group, sharded)
        shape, places = self.place
        y.view(len(y), *shape)[:, :, places].add_(added.view(len(y), shape[0], places.stop - places.start, shape[2]))
        return y

    def add_to_sum(self, y: Tensor, x: Tensor, sharded: ShardedRows | None, keys: Tensor | None) -> Tensor:
        """The same for a row-parallel layer: ``y`` is whole, or a shard of ``sharded``."""
        hidden = self._hidden(x, keys)
        if self.tp_group is not None:
            hidden = sum_over_ranks(hidden, self.tp_group, sharded)
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
