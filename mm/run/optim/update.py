"""One update of the weights: gradient norm, clipping, the guard against values that are not finite, Adam.

The host reads from the device once per step, after queuing all of this: a few numbers, summed over all ranks by one
collective.  If Adam's kernel supports ``grad_scale`` and ``found_inf``, it does clipping and guard.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from mm.device.device import Device
from mm.errors import AgreedError
from mm.parallel.activity import Journal, Work
from mm.parallel.mesh import Mesh
from mm.run.optim.block_adam import fills_weights
from mm.run.progress import StepResult

_NORM_EPSILON = 1e-6
"""Added to the gradient norm before dividing the maximum norm by it, as in Megatron and torch."""


def votes_on(device: Device, votes: Sequence[bool]) -> Tensor:
    """The votes of this rank, which ``update`` sums over all ranks: fp32 numbers on the device, 1 for yes.  The host
    does not wait for work queued there."""
    if not any(votes):  # nearly always, so without a copy
        return torch.zeros(len(votes), device=device.torch_device)
    return device.copy(torch.tensor(votes, dtype=torch.float32))


@torch.no_grad()
def update(
    optimizer: ChainedOptimizer, loss: Tensor, lr: float, mesh: Mesh, device: Device, votes: Tensor | None = None,
    max_norm: float | None = None, journal: Journal | None = None,
) -> StepResult:  # fmt: skip
    """Clip and update with learning rate ``lr``; ``loss`` is this rank's share of the loss, from ``run_schedule``.

    ``votes``: fp32 numbers of this rank, on the device, which the same collective sums over all ranks.  ``journal``
    records the waits for other ranks.

    If a gradient overflowed under loss scaling, the optimizer skips the step.  A step is bad if the loss or any other
    gradient is not finite, or the gradient norm is above ``max_norm``; then all weights and moments stay unchanged.  If
    ``max_norm`` is None, a bad step raises AgreedError on all ranks.
    """
    waiting = partial((journal or Journal()).during, Work.UPDATE_WAIT)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
    inner = _trained(optimizer)
    has_scaler = any(getattr(one, "grad_scaler", None) for one in optimizer.chained_optimizers)
    scale = [optimizer.get_loss_scale()] if has_scaler else []  # read before the scaler's update
    with waiting() if has_scaler else nullcontext():  # with a scaler, ranks agree on whether a gradient overflowed
        overflowed = optimizer.prepare_grads()
    sums = _summands(loss, () if overflowed else inner, mesh, votes)
    with waiting():
        dist.all_reduce(sums)
    numbers = torch.cat([sums, *scale])
    is_folded = not overflowed and clips_in_adam(optimizer, device)
    on_host = device.runtime.start_copying_back(numbers) if is_folded else lambda: numbers
    max_squares = math.inf if max_norm is None else float(  # in fp32, which a device and the host compare alike
        torch.tensor(max_norm * max_norm, dtype=torch.float32))  # ** would raise OverflowError
    if is_folded:
        _step_folded(inner, sums, max_squares)
    loss_sum, squares, *more = on_host().tolist()
    agreed, scales = (more, ()) if not scale else (more[:-1], more[-1:])
    fault = _fault(loss_sum, squares, max_squares)
    if fault and max_norm is None:
        raise AgreedError(f"{fault}, so no weight was changed; check the samples of this step, the learning rate and "
                          f"the precision, and resume from the last checkpoint, with --skip-bad-steps to go on")
    is_updated = not overflowed and not fault
    if is_updated:
        if not is_folded:
            _step_clipped(inner, math.sqrt(squares))
        _copy_to_model(optimizer)
        with waiting():
            _gather(optimizer)
    return StepResult(loss_sum, lr, math.sqrt(squares), scales[0] if scales else 1.0, is_updated, fault, tuple(agreed))


def clips_in_adam(optimizer: ChainedOptimizer, device: Device) -> bool:
    """Whether Adam's kernel does clipping and guard: torch's fused kernel, on devices where it supports them.
    ``mm.device.shims`` makes megatron use torch's kernel."""
    return device.platform.adam_obeys_scale and all(
        isinstance(one.optimizer, torch.optim.Adam) and all(group["fused"] for group in one.param_groups)
        for one in _trained(optimizer)
    )


def _trained(optimizer: ChainedOptimizer) -> list[Any]:
    """megatron's optimizers with weights trained on this rank; Any, because their base class lacks common
    attributes."""
    chained: list[Any] = optimizer.chained_optimizers
    return [one for one in chained if not one.is_stub_optimizer]


def _summands(loss: Tensor, inner: Sequence[Any], mesh: Mesh, votes: Tensor | None) -> Tensor:
    """fp32 [loss, squared norm of the gradients, *votes] of this rank, to be summed over all ranks; of the first two,
    each value is counted once.

    The squared norm is fp32, as in megatron (NPUs have no fp64), so a norm above 1.8e19 counts as not finite.
    Tensor-parallel ranks of the last stage hold the same loss.  Data- and context-parallel ranks hold the same
    gradients without the distributed optimizer, and different shards with it; megatron excludes duplicates on
    tensor-parallel ranks and tied stages.
    """
    squares = torch.zeros_like(loss)
    for chained in inner:
        if gradients := gradients_for_norm(chained):
            norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]  (no public name)
            square = torch.linalg.vector_norm(torch.stack(norms)).square()
            squares += _counted(square, _is_split(chained) or mesh.copy_rank == 0)
    sums = torch.stack([_counted(loss, mesh.tp_rank == 0), squares])
    if votes is not None:
        sums = torch.cat([sums, votes])
    return sums


def gradients_for_norm(chained: Any) -> list[Tensor]:
    """The gradients of an optimizer that count on this rank, by megatron's rules.  Its own method is
    ``get_main_grads_for_grad_norm`` up to megatron-core 0.18, ``get_grads_for_grad_norm`` in 0.19."""
    return [one.grad for one in chained.get_parameters() if one.grad is not None and param_is_not_shared(one)
            and param_is_not_tensor_parallel_duplicate(one)]


def _counted(value: Tensor, counts: bool) -> Tensor:
    """The value, or 0 if another rank counts it; values that are not finite are kept on every rank."""
    return value if counts else torch.where(value.isfinite(), 0.0, value)


def _fault(loss: float, squares: float, max_squares: float) -> str:
    """Why a step with this loss and this squared gradient norm is bad; empty if it is not."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(squares):
        return f"the gradient norm is {squares}: a gradient is not finite"
    if squares > max_squares:
        return f"the gradient norm is {math.sqrt(squares):.4g}, above the limit of {math.sqrt(max_squares):.4g}"
    return ""


def _step_folded(inner: Sequence[Any], sums: Tensor, max_squares: float) -> None:
    """Adam with clipping and guard in its kernel, without a host read.  ``found_inf`` of exactly 1 leaves weights,
    moments and step count unchanged."""
    is_bad = ~sums.isfinite().all()
    if max_squares < math.inf:
        is_bad |= sums[1] > max_squares
    found_inf = is_bad.float()
    for chained in inner:
        max_norm, adam = chained.config.clip_grad, chained.optimizer
        switches = {"found_inf": found_inf}
        if max_norm > 0.0:  # the kernel divides by it
            switches["grad_scale"] = ((sums[1].sqrt() + _NORM_EPSILON) / max_norm).clamp(min=1.0)
        vars(adam).update(switches)
        try:
            adam.step()
        finally:
            for name in switches:
                delattr(adam, name)


def _step_clipped(inner: Sequence[Any], grad_norm: float) -> None:
    """Adam after multiplying all gradients by the clip coefficient, if they need clipping."""
    for chained in inner:
        max_norm = chained.config.clip_grad
        coefficient = max_norm / (grad_norm + _NORM_EPSILON)
        gradients = [parameter.grad for parameter in chained.get_parameters() if parameter.grad is not None]
        if max_norm > 0.0 and coefficient < 1.0 and gradients:
            torch._foreach_mul_(gradients, coefficient)  # pyright: ignore[reportPrivateImportUsage]
        chained.optimizer.step()


def _copy_to_model(optimizer: ChainedOptimizer) -> None:
    """Copy the updated fp32 copies to the model's weights.

    megatron's ``step_with_ready_grads`` does this and ``_gather`` after its Adam, with one copy per tensor.  In fp32,
    and where fp32 copies are not kept, or not on the device, the optimizer updates the model's weights directly.
    """
    chained: Any
    for chained in _trained(optimizer):
        if _has_copies(chained) and not fills_weights(chained.optimizer):
            weights, copies = chained._get_model_and_main_params_data_float16()
            if weights:
                torch._foreach_copy_(weights, copies)  # pyright: ignore[reportPrivateImportUsage]


def _gather(optimizer: ChainedOptimizer) -> None:
    """Gather the weights that other data-parallel ranks updated; the next step's schedule starts overlapped gathers."""
    chained: Any
    for chained in optimizer.chained_optimizers:
        if _is_split(chained) and not chained.ddp_config.overlap_param_gather:
            for model in chained.model_chunks:
                model.start_param_sync()


def _is_split(chained: object) -> bool:
    """Whether data-parallel ranks own different parts of the weights."""
    return isinstance(chained, DistributedOptimizer)


def _has_copies(chained: object) -> bool:
    """Whether it may hold fp32 copies of 16-bit weights."""
    return isinstance(chained, MixedPrecisionOptimizer)
