"""Adam whose moments take 16 bits between steps: torch's fused kernel computes in fp32, a block of elements at a time.

While a block is updated, both of its moments are in fp32 as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mm.device.hashing import ROUNDED_AT_ONCE
from mm.device.pointwise import Leaf

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Piece:
    """A flat range of one parameter, at most one block long."""

    parameter: Tensor
    gradient: Tensor
    moments: tuple[Tensor, Tensor]
    step: Tensor
    """A copy of the parameter's count of updates, which the kernel increases."""


class RoundedAdam(torch.optim.AdamW):
    """torch's fused AdamW with moments in fp32 or bf16.

    The first moment is rounded to the nearest number: it forgets a tenth of itself in each step, and its error with it.
    The second one, with a beta of 0.999, changes by less than half of bf16's spacing in a step, so the nearest number
    would often be the one it had before.  It is rounded stochastically, and right on average.  The direction depends
    only on the weight and the step (``mm.device.hashing``), so a resumed run rounds the same way.
    """

    def __init__(self, base: torch.optim.AdamW, dtypes: Mapping[str, torch.dtype], rounded_at_random: Leaf) -> None:
        """Takes the place of ``base``, whose parameter groups it shares."""
        super().__init__([torch.empty(0)])  # slices of a buffer, which megatron's groups hold, would be refused here
        self.param_groups = base.param_groups
        self.dtypes = {moment: dtypes[moment] for moment in MOMENTS}
        self._rounded_at_random = rounded_at_random

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update.  ``grad_scale`` and ``found_inf`` are obeyed as by torch's own fused optimizers."""
        assert closure is None, "megatron computes the loss beforehand"
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            pieces = {parameter: list(self._pieces(parameter)) for parameter in trained}
            for block in _blocks([piece for some in pieces.values() for piece in some]):
                self._update(group, block)
            for parameter, some in pieces.items():
                self.state[parameter]["step"].copy_(some[-1].step)

    def _pieces(self, parameter: Tensor) -> Iterator[_Piece]:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None, "chosen among those with a gradient"
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment, dtype in self.dtypes.items():
                state[moment] = torch.zeros_like(parameter, dtype=dtype)
        flat = [one.detach().view(-1).split(ROUNDED_AT_ONCE) for one in (parameter, gradient, *map(state.get, MOMENTS))]
        for weights, gradients, first, second in zip(*flat, strict=True):
            yield _Piece(weights, gradients, (first, second), state["step"].clone())

    def _update(self, group: Mapping[str, Any], block: Sequence[_Piece]) -> None:
        firsts, seconds = ([piece.moments[index].float() for piece in block] for index in range(len(MOMENTS)))
        beta1, beta2 = group["betas"]
        adamw(
            [piece.parameter for piece in block], [piece.gradient for piece in block], firsts, seconds, [],
            [piece.step for piece in block], fused=True, grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None), amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        for piece, first, second in zip(block, firsts, seconds, strict=True):
            if piece.moments[0] is not first:
                piece.moments[0].copy_(first)
            if piece.moments[1] is not second:
                piece.moments[1].copy_(self._rounded_at_random(second, piece.parameter, piece.step.view(1)))


def _blocks(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces in order, together at most ``ROUNDED_AT_ONCE`` long."""
    block, size = list[_Piece](), 0
    for piece in pieces:
        if block and size + piece.parameter.numel() > ROUNDED_AT_ONCE:
            yield block
            block, size = [], 0
        block.append(piece)
        size += piece.parameter.numel()
    if block:
        yield block
