"""The gradients of a step: prepares their buffers before its passes, and reduces them after.

Gradients are reduced over the ranks that hold the same weights, then over tensor-parallel ranks where megatron does not
sum them, then over the two slots of a tied embedding.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from mm.parallel.activity import Work
from mm.parallel.zero.bucket_schedule import Zero2Schedule, Zero3Schedule
from mm.parallel.zero.gradient_buffers import forget_added, mark_stale, zero_stale
from mm.parallel.zero.gradient_shards import ShardedGradients, shard_range

_MIN_ELEMENTS = 1 << 20
"""Ranges of a buffer with at least this many elements are summed in place; smaller ones are first joined to one."""


def begin(models: Iterable[DistributedDataParallel], overwrites: bool) -> None:
    """Prepare megatron's gradient buffers for a step; ``overwrites``: that of ``Kernels``."""
    model: Any
    for model in models:
        if not overwrites:
            model.zero_grad_buffer()
            continue
        # What ``zero_grad_buffer`` does besides zeroing.
        forget_added(model.params_with_grad)
        for group in model.bucket_groups + model.expert_parallel_bucket_groups:
            group.reset()
        mark_stale(model.params_with_grad)


def end(models: Iterable[DistributedDataParallel]) -> None:
    """Zero the gradients of weights that no microbatch reached; call it before the reduction."""
    model: Any
    for model in models:
        zero_stale(model.params_with_grad)


def finalize(
    models: Sequence[DistributedDataParallel], passes: Zero2Schedule | Zero3Schedule | None,
    tied_group: dist.ProcessGroup | None,
) -> None:  # fmt: skip
    """Reduce the gradients after the last microbatch.  ``passes``: if ranks keep shards; most are reduced then."""
    chunk: Any = models[0].module
    with chunk.journal.during(Work.REDUCTION):
        _finish_gathering(models)
        if passes is None:
            _reduce(models)
        else:
            passes.end()
        sum_over_tensor_ranks(models, chunk.tp_group)
        _sum_tied(models, tied_group)


def _finish_gathering(models: Iterable[Any]) -> None:
    """Wait for the weights of modules that no microbatch used, because no forward hook has waited for their gather."""
    for model in models:
        if model.ddp_config.overlap_param_gather:
            for group in model.bucket_groups:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
                group.param_gather_dispatched = False


def _reduce(models: Sequence[Any]) -> None:
    """Reduce megatron's buffers.

    With overlapped reduction megatron reduces a bucket once all of its parameters have reported a gradient.  Those
    that took no part in the last microbatch (the ViT in a text-only one) are reported here, last chunk first and in
    bucket order: the order in which a rank with images reports them, so collectives match on all ranks.
    """
    end(models)
    for model in reversed(models):
        for group in model.bucket_groups if model.ddp_config.overlap_grad_reduce else ():
            for parameter in [p for p in group.params if p not in group.per_param_grad_ready_counts]:
                group.register_grad_ready(parameter)
        model.finish_grad_sync()


def sum_over_tensor_ranks(models: Iterable[DistributedDataParallel], group: dist.ProcessGroup) -> None:
    """Sum over tensor-parallel ranks the gradients of weights that each rank applies to its own rows or images only.

    They are already reduced over the other ranks, so with the distributed optimizer each rank sums only its shard.
    """
    if group.size() == 1:
        return
    ranges = [one for model in models for one in _own_ranges(model)]
    small = [one for one in ranges if one.numel() < _MIN_ELEMENTS]
    for one in ranges:
        if one.numel() >= _MIN_ELEMENTS:
            dist.all_reduce(one, group=group)
    if small:
        joined = torch.cat(small)
        dist.all_reduce(joined, group=group)
        for one, summed in zip(small, joined.split([one.numel() for one in small]), strict=True):
            one.copy_(summed)


def _own_ranges(model: Any) -> Iterator[Tensor]:
    if isinstance(model, ShardedGradients):
        for bucket in model.gradient_buckets:
            start, stop = bucket.shard_range
            for first, last in _summed_spans(bucket.places, start, stop):
                yield bucket.shard[first - start : last - start]
        return
    for group in model.bucket_groups:
        for bucket in group.buckets:
            data, start, stop = bucket.grad_data, 0, bucket.grad_data.numel()
            if model.ddp_config.use_distributed_optimizer:
                start, stop = shard_range(bucket, group)
            offset = data.storage_offset()
            weights = sorted(bucket.params_list, key=lambda weight: weight.main_grad.storage_offset())
            firsts = [weight.main_grad.storage_offset() - offset for weight in weights]
            places = {one: (first, first + one.numel()) for one, first in zip(weights, firsts, strict=True)}
            for first, last in _summed_spans(places, start, stop):
                yield data[first:last]


def _summed_spans(places: Mapping[Any, tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The spans of a bucket between ``start`` and ``stop`` that tensor-parallel ranks sum.

    ``places``: where each weight begins and ends, in order.  Neighbours are joined, with the padding between them.
    """
    for is_summed, neighbours in groupby(places.items(), key=lambda place: place[0].sequence_parallel):
        spans = [span for _, span in neighbours] if is_summed else []
        if spans and (first := max(spans[0][0], start)) < (last := min(spans[-1][1], stop)):
            yield first, last


def _sum_tied(models: Sequence[Any], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients of a tied embedding over its two slots, which have the same shards."""
    tied: list[Tensor] = [gradient for model in models for gradient in _tied_gradients(model)]
    if len(tied) == 2:  # both on this rank, in two of its chunks
        tied[0] += tied[1]
        tied[1].copy_(tied[0])
    elif tied:
        dist.all_reduce(tied[0], group=group)


def _tied_gradients(model: Any) -> Iterator[Tensor]:
    """The reduced gradients of weights that another slot holds too, or this rank's shards if it keeps only those."""
    if isinstance(model, ShardedGradients):
        for bucket in model.gradient_buckets:
            if any(getattr(weight, "shared_embedding", False) for weight in bucket.weights):
                assert len(bucket.weights) == 1, "the word embedding and its copy are buckets of their own"
                yield bucket.shard
        return
    for weight in model.module.parameters():
        if getattr(weight, "shared_embedding", False) and weight.requires_grad:
            yield weight.main_grad
