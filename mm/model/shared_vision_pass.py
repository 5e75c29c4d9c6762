"""Visual tokens of several microbatches from one pass through the ViT, whose gradients go back in one pass too.

Knows nothing of the pipeline: microbatches take their visual tokens in order; their backward passes may run in any
order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class EncodedTogether:
    """The visual tokens that one rank makes of several microbatches' images.

    The first microbatch fills it; each takes its own rows.  The ViT's backward pass runs once, inside the backward pass
    of the microbatch whose gradient comes last.
    """

    def __init__(self, num_tokens: Sequence[int], are_exchanged: bool) -> None:
        """``num_tokens``: visual tokens that this rank makes of each microbatch, which may be none.

        ``are_exchanged``: every microbatch then brings a gradient, even one without rows here.  So all ranks of the
        exchange run the ViT's backward pass in the same microbatch, and none waits for another.
        """
        self.num_tokens = tuple(num_tokens)
        self._numbers = [number for number, count in enumerate(num_tokens) if count or are_exchanged]
        self._next = 0
        self._made: Tensor | None = None
        self._rows: tuple[Tensor, ...] = ()
        self._gradients: dict[int, Tensor] = {}

    def fill(self, made: Tensor) -> None:
        """``made``: [sum(num_tokens), hidden], with the graph that leads to it."""
        self._made, self._rows = made, made.detach().split(self.num_tokens)

    def take(self) -> Tensor | None:
        """The visual tokens of the next microbatch, as a tensor of its own; None if this rank made none of them and no
        exchange needs it, or if it made none for any of the microbatches."""
        number, self._next = self._next, self._next + 1
        if number not in self._numbers or not any(self.num_tokens):
            return None
        assert self._made is not None, "the first of these microbatches encodes the images of all"
        if not self._made.requires_grad:
            return self._rows[number].clone()
        return _Rows.apply(self._made.new_empty(0, requires_grad=True), self._rows[number], self, number)

    def take_gradient(self, number: int, gradient: Tensor) -> None:
        """``gradient`` of the visual tokens of microbatch ``number``; the last one to come starts the backward pass."""
        self._gradients[number] = gradient
        if len(self._gradients) == len(self._numbers):
            whole = torch.cat([self._gradients[number] for number in self._numbers])
            made, self._made, self._rows, self._gradients = self._made, None, (), {}
            assert made is not None, "each microbatch has one backward pass"
            torch.autograd.backward(made, whole)


class _Rows(torch.autograd.Function):
    """Rows without a graph, whose gradient goes to ``EncodedTogether``; ``anchor`` makes autograd ask for it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, together: EncodedTogether, number: int) -> Tensor:
        ctx.together, ctx.number = together, number
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.together.take_gradient(ctx.number, gradient)
        return None, None, None, None
