"""How our own backward passes fill megatron's gradient buffers.

The first product of a step can overwrite a weight's buffer, so buffers need not be zeroed before a step: ``begin``
marks them stale, the first writer overwrites and unmarks, and ``end`` zeroes those that no microbatch reached (the
ViT's, if none had an image) before the reduction.  Only weights of two or more dimensions are marked; their gradients
pass through ``take_buffer`` or ``gradient_buffer``.  megatron's hook adds the others', so ``begin`` zeroes those.

``sum_over_tensor_ranks`` completes the gradients that megatron does not sum, once all others are reduced.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

_STALE = "main_grad_is_stale"
_MIN_ELEMENTS = 1 << 20
"""A range of a buffer with at least this many elements is summed in place; smaller ones are joined first."""


def take_buffer(weight: Tensor) -> tuple[Tensor, bool]:
    """The buffer in which gradients of ``weight`` are summed, and whether the caller must overwrite its contents.

    This is megatron's buffer, in fp32 or the weight's dtype; without megatron's DDP, fp32 zeros of the same shape.
    """
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device), False
    assert buffer.dtype in (torch.float32, weight.dtype), "megatron's DDP has these two (ddp_config)"
    is_stale = getattr(weight, _STALE, False)
    if is_stale:
        setattr(weight, _STALE, False)
    return buffer, is_stale


def gradient_buffer(weight: Tensor) -> Tensor:
    """``take_buffer`` for a caller that can only add: a stale buffer is zeroed first."""
    buffer, is_stale = take_buffer(weight)
    return buffer.zero_() if is_stale else buffer


def gradient_from(buffer: Tensor, weight: Tensor) -> Tensor | None:
    """What a backward that has filled ``buffer`` returns to autograd as the gradient of ``weight``.

    With megatron's DDP, None: the gradient is already in its buffer.  megatron's hook still runs, after the backward of
    every use of the weight in the pass.  It does not add a gradient if ``grad_added_to_main_grad`` is set, but requires
    that ``grad`` is not None, so a single element expanded to the weight's shape stands in.
    """
    marked: Any = weight  # carries megatron's attributes, which torch's types lack
    if buffer is not getattr(marked, "main_grad", None):
        return buffer.to(weight.dtype)
    marked.grad_added_to_main_grad = True
    marked.grad = weight.new_empty(()).expand(weight.shape)
    return None


def begin(models: Iterable[DistributedDataParallel], overwrites: bool) -> None:
    """Prepare the buffers for a step.  ``overwrites``: whether this device's products can overwrite (``Kernels``)."""
    model: Any
    for model in models:
        if not overwrites:
            model.zero_grad_buffer()
            continue
        # What ``zero_grad_buffer`` does besides zeroing.
        for weight in model.params_with_grad:
            weight.grad_added_to_main_grad = False
        for group in model.bucket_groups + model.expert_parallel_bucket_groups:
            group.reset()
        for weight in model.params_with_grad:
            setattr(weight, _STALE, weight.ndim > 1)
        _zero([weight for weight in model.params_with_grad if weight.ndim == 1])


def end(models: Iterable[DistributedDataParallel]) -> None:
    """Zero the buffers that are still stale after the last microbatch, before the rest is reduced."""
    model: Any
    for model in models:
        stale = [weight for weight in model.params_with_grad if getattr(weight, _STALE, False)]
        _zero(stale)
        for weight in stale:
            setattr(weight, _STALE, False)


def _zero(weights: list[Any]) -> None:
    if weights:
        torch._foreach_zero_([weight.main_grad for weight in weights])  # pyright: ignore[reportPrivateImportUsage]


def sum_over_tensor_ranks(models: Iterable[DistributedDataParallel], group: dist.ProcessGroup) -> None:
    """Sum over tensor-parallel ranks the gradients of weights that each rank applies to its own rows or images only.

    They are already reduced over the other ranks, so with the distributed optimizer each rank sums only its shard.
    """
    if group.size() == 1:
        return
    ranges = [one for model in models for one in _own_ranges(model) if one.numel()]
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
    """Flat ranges of ``model``'s gradient buffers that ``sum_over_tensor_ranks`` sums; neighbours are joined, with the
    padding between them."""
    for group in model.bucket_groups:
        for bucket in group.buckets:
            data, start, stop = bucket.grad_data, 0, bucket.grad_data.numel()
            if model.ddp_config.use_distributed_optimizer:
                size = stop // group.intra_distributed_optimizer_instance_size
                start = size * group.intra_distributed_optimizer_instance_rank
                stop = start + size
            weights = sorted(bucket.params_list, key=lambda weight: weight.main_grad.storage_offset())
            for is_summed, neighbours in groupby(weights, key=lambda weight: weight.sequence_parallel):
                gradients = [weight.main_grad for weight in neighbours] if is_summed else []
                places = [one.storage_offset() - data.storage_offset() for one in gradients]
                if gradients:
                    first, last = max(places[0], start), min(places[-1] + gradients[-1].numel(), stop)
                    yield data[first : max(first, last)]
