"""How our own backward passes fill megatron's gradient buffers.

Buffers need not be zeroed before a step: ``mark_stale`` marks them, the first writer overwrites and unmarks, and
``zero_stale`` zeroes those that no microbatch reached.  Only weights of two or more dimensions are marked; megatron's
hook adds the others' gradients, so ``mark_stale`` zeroes those.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mm.parallel.zero.weight_shards import placeholder

_STALE = "main_grad_is_stale"


@contextmanager
def freed_gradients(models: Iterable[Any]) -> Iterator[None]:
    """Free the memory of all gradients that ``models``, in megatron's DDP, keep between steps, while the body runs;
    afterwards they are zeros."""
    freed: list[tuple[Tensor, torch.Size, list[tuple[Tensor, torch.Size, int]]]] = []
    for whole, slices in (buffer for model in models for buffer in _buffers(model)):
        freed.append((whole, whole.shape, [(one, one.shape, int(one.storage_offset())) for one in slices]))
        for one in (whole, *slices):
            one.data = placeholder(one)
    yield
    for whole, shape, places in freed:
        whole.data = whole.new_zeros(shape)
        for one, shape_of_one, start in places:
            one.data = whole[start : start + shape_of_one.numel()].view(shape_of_one)


def _buffers(model: Any) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Each flat tensor of gradients, and the tensors that are slices of it."""
    for buffer in model.buffers:
        if (whole := getattr(buffer, "grad_data", None)) is not None:
            yield whole, [*(bucket.grad_data for bucket in buffer.buckets), *(one.main_grad for one in buffer.params)]
    for bucket in getattr(model, "gradient_buckets", ()):  # shards, with ``mm.parallel.zero.gradient_shards``
        yield bucket.shard, []


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

    With megatron's DDP, None: the gradient is in its buffer.  megatron's hook adds none if ``grad_added_to_main_grad``
    is set, but requires that ``grad`` is not None, so a single element expanded to the weight's shape stands in.
    """
    parameter: Any = weight  # with megatron's attributes, which torch's types lack
    if buffer is not getattr(parameter, "main_grad", None):
        return buffer.to(weight.dtype)
    parameter.grad_added_to_main_grad = True
    parameter.grad = weight.new_empty(()).expand(weight.shape)
    return None


def forget_added(weights: Iterable[Any]) -> None:
    """Undo what ``gradient_from`` noted for megatron's hook; call it before each step."""
    for weight in weights:
        weight.grad_added_to_main_grad = False


def mark_stale(weights: Iterable[Any]) -> None:
    """Prepare the buffers of ``weights`` for their first writers, whatever they hold."""
    for weight in weights:
        setattr(weight, _STALE, weight.ndim > 1)
    _zero([weight for weight in weights if weight.ndim == 1])


def zero_stale(weights: Iterable[Any]) -> None:
    """Zero the buffers that nothing was written to since ``mark_stale``."""
    stale = [weight for weight in weights if getattr(weight, _STALE, False)]
    _zero(stale)
    for weight in stale:
        setattr(weight, _STALE, False)


def _zero(weights: list[Any]) -> None:
    if weights:
        torch._foreach_zero_([weight.main_grad for weight in weights])  # pyright: ignore[reportPrivateImportUsage]
