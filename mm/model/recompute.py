"""Activations that are computed again in the backward pass instead of being kept."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mm.model.host_activations import Keep, keep_here
from mm.model.parallel.sharded_rows import CutRows


@dataclass(frozen=True)
class Remade:
    """The input of a linear layer that is recomputed for the weight's gradient instead of being kept."""

    made: Tensor
    again: Callable[[Tensor], Tensor]
    """Makes it from ``made_from``."""
    made_from: Tensor
    keep: Keep = keep_here
    """How ``made_from``, and what else the linear layer saves, are kept."""


LinearInput = Tensor | Remade


def apply_linear(
    linear: nn.Module, x: LinearInput, cut: CutRows | None = None, keys: Tensor | None = None
) -> Any:
    """Apply ``linear`` to ``x``; if ``x`` is ``Remade``, autograd keeps the function ``again`` instead of the tensor.

    Saved tensors are matched by address and shape; our linear layers save neither other views nor copies of ``made``.
    """
    if isinstance(x, Tensor):
        return linear(x, cut, keys)
    made, address = x.made, (x.made.data_ptr(), x.made.shape)
    keep, again, to_keep = x.keep, x.again, [x.made_from]

    def keep_saved(saved: Tensor) -> Callable[[], Tensor]:
        """Autograd holds this function as long as what it keeps, so it must not hold tensors then."""
        if (saved.data_ptr(), saved.shape) != address:
            return keep(saved)
        made_from = keep(to_keep[0])
        return lambda: again(made_from())

    with torch.autograd.graph.saved_tensors_hooks(keep_saved, lambda kept: kept()):
        out = linear(made, cut, keys)
    to_keep.clear()
    return out


def recomputing(modules: Iterable[nn.Module], function: Callable[..., Any], x: Tensor, *others: Any) -> Any:
    """``function(x, *others)``, keeping only its arguments and calling it again in the backward pass.

    ``modules``: those that ``function`` uses.  If neither they nor ``x`` need a gradient, nothing is kept.
    """
    is_trained = any(parameter.requires_grad for module in modules for parameter in module.parameters())
    if torch.is_grad_enabled() and (x.requires_grad or is_trained):
        return checkpoint(function, x, *others, use_reentrant=False, preserve_rng_state=False)
    return function(x, *others)
