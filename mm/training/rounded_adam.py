"""Adam whose states take 16 bits between steps: torch's fused kernel computes in fp32, a block of elements at a time.

Moments may be in bf16.  The fp32 copy of a bf16 weight may be left out, or be stored as the weight and a remainder
(``mm.weights.halves``).  While a block is updated, all of its states are in fp32.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mm.config.flags import KeptCopy
from mm.device.hashing import ROUNDED_AT_ONCE
from mm.device.pointwise import Leaf
from mm.weights.halves import REMAINDER, joined, split

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class KeptStates:
    """How the states of a trained weight are kept between steps."""

    moments: Mapping[str, torch.dtype]
    """fp32 or bf16, by ``MOMENTS``."""
    copy: KeptCopy = "fp32"

    @property
    def is_rounded(self) -> bool:
        """Whether megatron's own optimizer cannot keep them so."""
        return self.copy != "fp32" or set(self.moments.values()) != {torch.float32}


@dataclass(frozen=True)
class _Piece:
    """A flat range of one weight, at most one block long."""

    weight: Tensor
    """fp32; or bf16, if no fp32 copy is kept."""
    remainder: Tensor | None
    """None: the weight lacks nothing."""
    gradient: Tensor
    moments: tuple[Tensor, Tensor]
    step: Tensor
    """A copy of the weight's count of updates, which the kernel increases."""

    def numbers(self) -> Tensor:
        """The weight in fp32: itself, or in new memory."""
        return self.weight.float() if self.remainder is None else joined(self.weight, self.remainder)


class RoundedAdam(torch.optim.AdamW):
    """torch's fused AdamW with states in fp32 or 16 bits.

    The first moment is rounded to the nearest number: it forgets a tenth of itself in each step, and its error with it.
    The second one, with a beta of 0.999, changes by less than half of bf16's spacing in a step, so the nearest number
    would often be the one it had before.  It is rounded stochastically, and right on average; so is a bf16 weight of
    which nothing else is kept, for the same reason.  The direction depends only on the weight, its second moment and
    the step (``mm.device.hashing``), so a resumed run rounds the same way.
    """

    def __init__(
        self, base: torch.optim.AdamW, kept: KeptStates, weights: Mapping[Tensor, Tensor], rounded_at_random: Leaf
    ) -> None:
        """Takes the place of ``base``, whose parameter groups it shares.

        ``weights``: unless fp32 copies are kept, the bf16 weight of each copy in the groups.  The copies give up their
        memory, and only stand for their weights: torch accepts no fp32 gradient on a bf16 tensor.
        """
        super().__init__([torch.empty(0)])  # slices of a buffer, which megatron's groups hold, would be refused here
        self.param_groups = base.param_groups
        self.kept = kept
        self.weights = weights
        self._rounded_at_random = rounded_at_random
        for copy, weight in weights.items():
            assert weight.dtype == torch.bfloat16 and weight.numel() == copy.numel(), (weight.dtype, weight.shape)
            copy.untyped_storage().resize_(0)
            if kept.copy == "remainder":
                self.state[copy][REMAINDER] = torch.zeros(copy.shape, dtype=torch.int16, device=copy.device)

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
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment, dtype in self.kept.moments.items():
                state[moment] = torch.zeros_like(parameter, dtype=dtype)
        weight = self.weights.get(parameter, parameter)
        flat = [one.detach().view(-1).split(ROUNDED_AT_ONCE) for one in (weight, gradient, *map(state.get, MOMENTS))]
        remainders = state[REMAINDER].view(-1).split(ROUNDED_AT_ONCE) if REMAINDER in state else [None] * len(flat[0])
        for weights, remainder, gradients, first, second in zip(flat[0], remainders, *flat[1:], strict=True):
            yield _Piece(weights, remainder, gradients, (first, second), state["step"].clone())

    def _update(self, group: Mapping[str, Any], block: Sequence[_Piece]) -> None:
        numbers = [piece.numbers() for piece in block]
        firsts, seconds = ([piece.moments[index].float() for piece in block] for index in range(len(MOMENTS)))
        beta1, beta2 = group["betas"]
        adamw(
            numbers, [piece.gradient for piece in block], firsts, seconds, [], [piece.step for piece in block],
            fused=True, grad_scale=getattr(self, "grad_scale", None), found_inf=getattr(self, "found_inf", None),
            amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip
        for piece, updated, first, second in zip(block, numbers, firsts, seconds, strict=True):
            self._keep(piece, updated, first, second)

    def _keep(self, piece: _Piece, updated: Tensor, first: Tensor, second: Tensor) -> None:
        """Store the fp32 results in the forms in which they are kept."""
        step = piece.step.view(1)
        if piece.moments[0] is not first:
            piece.moments[0].copy_(first)
        if piece.moments[1] is not second:
            piece.moments[1].copy_(self._rounded_at_random(second, updated, step))
        if piece.remainder is not None:
            split(updated, piece.weight, piece.remainder)
        elif piece.weight is not updated:
            # equal weights with equal updates, which Adam's first steps make, must not all be rounded alike
            salts = (updated.view(torch.int32) ^ second.view(torch.int32)).view(torch.float32)
            piece.weight.copy_(self._rounded_at_random(updated, salts, step))


def weights_without_copies(optimizer: torch.optim.Optimizer) -> Mapping[Tensor, Tensor]:
    """The bf16 weights that ``optimizer`` updates itself, by the tensors that stand for them in its groups; empty if it
    updates fp32 weights or copies."""
    return optimizer.weights if isinstance(optimizer, RoundedAdam) else {}


def _blocks(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces in order, together at most ``ROUNDED_AT_ONCE`` long."""
    block, size = list[_Piece](), 0
    for piece in pieces:
        if block and size + piece.gradient.numel() > ROUNDED_AT_ONCE:
            yield block
            block, size = [], 0
        block.append(piece)
        size += piece.gradient.numel()
    if block:
        yield block
