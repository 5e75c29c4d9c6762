"""megatron's gradient buffers, as our own backward passes fill them.

The first product of a step can write a weight's buffer instead of adding to it.  So these buffers are not zeroed before
a step: ``begin`` marks them stale, whoever writes one first takes the mark away, and ``end`` zeroes those that no
microbatch has reached (the ViT's, where none had a picture) before anything is reduced.  Stale are weights of two axes
and more, whose gradients pass through ``gradient_buffer`` or ``take_buffer``; megatron's hook adds those of the others.
"""

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

_STALE = "main_grad_is_stale"


def take_buffer(weight: Tensor) -> tuple[Tensor, bool]:
    """Where gradients of ``weight`` are summed, and whether the caller must overwrite what is there.

    It is megatron's buffer, fp32 or of the weight's dtype; without a DDP, fp32 zeros of the same shape.
    """
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device), False
    assert buffer.dtype in (torch.float32, weight.dtype), "the two that megatron's DDP may be told (ddp_config)"
    is_stale = getattr(weight, _STALE, False)
    if is_stale:
        setattr(weight, _STALE, False)
    return buffer, is_stale


def gradient_buffer(weight: Tensor) -> Tensor:
    """``take_buffer`` for a caller that can only add."""
    buffer, is_stale = take_buffer(weight)
    return buffer.zero_() if is_stale else buffer


def gradient_from(buffer: Tensor, weight: Tensor) -> Tensor | None:
    """What a backward that has filled ``gradient_buffer`` returns to autograd for ``weight``.

    With megatron's DDP nothing: the gradient is where it belongs.  megatron's hook runs all the same, once all uses
    of the weight in the pass have had their backward; it adds no gradient whose weight says
    ``grad_added_to_main_grad``, but wants one to be there, so a single element of the weight's shape stands in.
    """
    marked: Any = weight  # with megatron's attributes
    if buffer is not getattr(marked, "main_grad", None):
        return buffer.to(weight.dtype)
    marked.grad_added_to_main_grad = True
    marked.grad = weight.new_empty(()).expand(weight.shape)
    return None


def begin(models: Iterable[DistributedDataParallel], overwrites: bool) -> None:
    """Before the first microbatch of a step.  ``overwrites``: whether products of this device can (``Kernels``)."""
    model: Any
    for model in models:
        if not overwrites:
            model.zero_grad_buffer()
            continue
        # What ``zero_grad_buffer`` does beside zeroing.
        for weight in model.params_with_grad:
            weight.grad_added_to_main_grad = False
        for group in model.bucket_groups + model.expert_parallel_bucket_groups:
            group.reset()
        for weight in model.params_with_grad:
            setattr(weight, _STALE, weight.ndim > 1)
        _zero([weight for weight in model.params_with_grad if weight.ndim == 1])


def end(models: Iterable[DistributedDataParallel]) -> None:
    """After the last microbatch, before what is left to be reduced is."""
    model: Any
    for model in models:
        stale = [weight for weight in model.params_with_grad if getattr(weight, _STALE, False)]
        _zero(stale)
        for weight in stale:
            setattr(weight, _STALE, False)


def _zero(weights: list[Any]) -> None:
    if weights:
        torch._foreach_zero_([weight.main_grad for weight in weights])  # pyright: ignore[reportPrivateImportUsage]
