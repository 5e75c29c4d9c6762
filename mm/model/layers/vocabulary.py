"""The two layers that are sharded over the vocabulary: the word embedding, and the output layer with its cross entropy.

Neither makes a gradient of its weight's shape, and nothing here waits for the device, as masks would: ids of other
ranks' rows are mapped to rows of this rank, and their results multiplied by 0.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor, nn

from mm.config.model import LanguageConfig
from mm.device.kernels import EAGER_LOGITS, Accumulate, LogitKernels
from mm.model.layers.layer_context import LayerContext, never_initialize
from mm.model.layers.linear import sum_over_ranks
from mm.model.layers.loss import MAX_LOGIT_ROWS, LossInputs, max_logit_rows
from mm.model.parallel.sharded_rows import ShardedRows
from mm.parallel.zero.gradient_buffers import gradient_buffer, gradient_from, take_buffer


def rows_here(ids: Tensor, first_id: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """For each id a row among the ``num_rows`` that start at ``first_id``, and 1.0 if it is the id's own, else 0.0.

    Other ranks' ids are spread over our rows: many gradients added to one row, even zeros, would be serialised.
    """
    rows = ids - first_id
    inside = rows.remainder(num_rows)
    return inside, (inside == rows).float()


class _Lookup(torch.autograd.Function):
    """Rows of the weight by id; their gradients are added to the rows of megatron's buffer, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, is_here: Tensor | None) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(rows, is_here)
        found = F.embedding(rows, weight)
        return found if is_here is None else found * is_here.to(found.dtype).unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        rows, is_here = ctx.saved_tensors
        buffer = gradient_buffer(ctx.weight)
        gradient = gradient.to(buffer.dtype)
        if is_here is not None:
            gradient = gradient * is_here.to(gradient.dtype).unsqueeze(1)
        buffer.index_put_((rows,), gradient, accumulate=True)
        return gradient_from(buffer, ctx.weight), None, None


class VocabularyEmbedding(VocabParallelEmbedding):
    """megatron's word embedding, whose forward would write by boolean masks, with our own lookup."""

    tp_group: dist.ProcessGroup

    def __init__(self, config: LanguageConfig, context: LayerContext) -> None:
        super().__init__(
            config.vocab_size, config.hidden_size, init_method=never_initialize, config=context.parallel,
            tp_group=context.tp_group)

    def forward(self, token_ids: Tensor, sharded: ShardedRows | None = None) -> Tensor:
        """int64 [num_tokens] -> [num_tokens, hidden], whole on every rank, or a shard of ``sharded``."""
        if self.tp_group.size() == 1:
            return _Lookup.apply(self.weight, token_ids, None)
        rows, is_here = rows_here(token_ids, self.vocab_start_index, self.num_embeddings_per_partition)
        found = _Lookup.apply(self.weight, rows, is_here)
        return sum_over_ranks(found, self.tp_group, sharded)


class _WeightedCrossEntropy(torch.autograd.Function):
    """Sum of weighted token losses of x W^T, whose logits exist for ``max_rows`` rows at a time.

    Forward keeps two numbers per row and the last block's logits; backward recomputes the others, which is one of this
    layer's four products.  Computing gradients in forward would save it, but the loss scale is not known there, without
    which fp16 gradients vanish, and megatron's buffers would change outside the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, target: Tensor, is_here: Tensor | None, row_weights: Tensor,
        accumulate: Accumulate, group: dist.ProcessGroup | None, max_rows: int, kernels: LogitKernels,
    ) -> Tensor:
        found = torch.empty(3, len(x), dtype=torch.float32, device=x.device)
        row_max, total, target_logit = found
        logits = kept = None
        for rows in _blocks(len(x), max_rows):
            del logits, kept  # before the next are made
            logits = F.linear(x[rows], weight)
            target_logit[rows] = logits.gather(1, target[rows, None]).squeeze(1).float()
            row_max[rows, None], total[rows, None], kept = kernels.forward(logits)
        if is_here is not None:
            target_logit *= is_here
        whole_max, whole_total, target_logit = _over_ranks(row_max, total, target_logit, group)
        to_probability = (row_max - whole_max).exp() / whole_total
        ctx.save_for_backward(x, target, is_here, row_weights, row_max, to_probability)
        ctx.weight, ctx.accumulate, ctx.group, ctx.max_rows = weight, accumulate, group, max_rows
        ctx.kernels, ctx.kept = kernels, kept
        return ((whole_total.log() - (target_logit - whole_max)) * row_weights).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, target, is_here, row_weights, row_max, to_probability = ctx.saved_tensors
        weight, kernels, kept, ctx.kept = ctx.weight, ctx.kernels, ctx.kept, None
        scale = row_weights * upstream
        to_gradient = to_probability * scale
        at_target = scale if is_here is None else scale * is_here
        x_gradient = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        buffer, is_stale = take_buffer(weight) if ctx.needs_input_grad[1] else (None, False)
        reductions = []
        for rows in reversed(_blocks(len(x), ctx.max_rows)):
            if kept is None:
                kept = kernels.kept(F.linear(x[rows], weight), row_max[rows, None])
            of_rows = (one[rows, None] for one in (row_max, to_gradient, target, at_target))
            gradient = kernels.gradient(kept, *of_rows, x.dtype)
            kept = None
            if x_gradient is not None:
                torch.mm(gradient, weight, out=x_gradient[rows])
                if ctx.group is not None:
                    reductions.append(dist.all_reduce(x_gradient[rows], group=ctx.group, async_op=True))
            if buffer is not None:
                ctx.accumulate(buffer, gradient, x[rows], is_stale)
                is_stale = False
            del gradient  # before the next is made
        if buffer is not None and is_stale:  # without a target nothing was written
            buffer.zero_()
        for reduction in reductions:
            reduction.wait()
        weight_gradient = None if buffer is None else gradient_from(buffer, weight)
        return x_gradient, weight_gradient, *(None,) * 7


def _blocks(num_rows: int, max_rows: int) -> list[slice]:
    return [slice(start, start + max_rows) for start in range(0, num_rows, max_rows)]


def _over_ranks(
    row_max: Tensor, total: Tensor, target_logit: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """For each row: the largest logit, the sum of e^(logit - largest), and the target's logit.

    The arguments cover this rank's columns (the target's logit is 0 if another rank has it); the results cover the
    whole vocabulary.
    """
    if group is None or not len(row_max):
        return row_max, total, target_logit
    whole_max = row_max.clone()
    dist.all_reduce(whole_max, dist.ReduceOp.MAX, group)
    sums = torch.stack((total * (row_max - whole_max).exp(), target_logit))
    dist.all_reduce(sums, group=group)
    return whole_max, sums[0], sums[1]


class OutputLayer(nn.Module):
    """Hidden states to the loss of their logits; the vocabulary is sharded over tensor parallelism."""

    def __init__(self, config: LanguageConfig, context: LayerContext, has_weight: bool) -> None:
        """Without a weight of its own (tied embeddings), each call must pass one."""
        super().__init__()
        weight = context.empty(config.vocab_size // context.tp_size, config.hidden_size) if has_weight else None
        self.register_parameter("weight", weight)
        self.accumulate = context.device.kernels.accumulate
        self.tp_group = context.tp_group
        self.kernels = context.device.kernels.logits
        self.max_rows = max_logit_rows(context.parallel.params_dtype.itemsize, self.kernels.is_fused)

    def forward(self, x: Tensor, inputs: LossInputs, shared_weight: Tensor | None = None) -> Tensor:
        """Rows that have a target [num_targets, hidden] -> sum of their weighted losses, fp32, equal on all ranks."""
        weight: Any = self.weight if shared_weight is None else shared_weight
        target, is_here, group = inputs.target_ids, None, None
        if self.tp_group.size() > 1:
            group, num_rows = self.tp_group, weight.shape[0]
            target, is_here = rows_here(inputs.target_ids, group.rank() * num_rows, num_rows)
        return weighted_cross_entropy(
            x, weight, target, is_here, inputs.weights, self.accumulate, group, self.max_rows, self.kernels
        )


def weighted_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, is_here: Tensor | None, row_weights: Tensor, accumulate: Accumulate,
    group: dist.ProcessGroup | None = None, max_rows: int = MAX_LOGIT_ROWS, kernels: LogitKernels = EAGER_LOGITS,
) -> Tensor:
    """Sum of the weighted cross entropies of the logits x W^T, in fp32; the same for any ``max_rows``.

    x is [num_targets, hidden], ``row_weights`` [num_targets].  ``weight`` [vocabulary / TP, hidden] has the rows of
    this rank of ``group``; ``is_here`` (see ``rows_here``) marks the targets among them, None means all.
    """
    return _WeightedCrossEntropy.apply(x, weight, target, is_here, row_weights, accumulate, group, max_rows, kernels)
