"""The sum and its norm in one pass against two operators: results and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mm.device.device import Device
from tests.devices import kernels_of

ROWS, WIDTH = 37, 24
TOLERANCES = {
    # relative, by norm of each result
    torch.float32: 5e-7,  # measured 1.4e-7
    torch.bfloat16: 1e-2,  # measured 4.1e-3: autograd's own form rounds the weight's gradient to bf16
}


def results(kind: str, dtype: torch.dtype, adds: str, uses_total: bool = True, freezes: bool = False,
            passes: int = 1, orders: bool = False) -> list[Tensor]:
    """Both results, the gradients of all summands, and what megatron's buffer of the weight holds then."""
    Device.pick("cpu")
    from mm.model.layers.norm import Residual, RMSNorm
    from mm.model.parallel.rows import Permutation

    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weight: Any = nn.Parameter(random(WIDTH))
    weight.main_grad = torch.full((WIDTH,), 0.5)
    norm = RMSNorm(weight.requires_grad_(not freezes), 1e-6, kernels_of(kind, lambda function: function))
    for _ in range(passes):
        summands = [random(ROWS, WIDTH), random(ROWS, WIDTH), random(WIDTH)][: 1 + len(adds.split())]
        for summand in summands[:2]:  # a bias has its gradient by another norm
            summand.requires_grad_()
        order = Permutation.of(torch.randperm(ROWS, generator=generator)) if orders else None
        total, normed = norm(Residual(*summands)._replace(order=order))
        upstream = [random(ROWS, WIDTH), random(ROWS, WIDTH)]
        (normed * upstream[0] + (total * upstream[1] if uses_total else 0.0)).sum().backward()
        if kind == "cpu" and not freezes:  # as megatron's hook does
            weight.main_grad += weight.grad.float()
            weight.grad = None
    return [total.detach(), normed.detach(), *(one.grad for one in summands[:2]), weight.main_grad]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("adds", ["", "rows", "rows bias"])
@pytest.mark.parametrize("options", [{}, {"uses_total": False}, {"freezes": True}, {"passes": 2}, {"orders": True},
                                     {"orders": True, "uses_total": False}], ids=str)
def test_one_pass_is_two_operators(dtype: torch.dtype, adds: str, options: dict) -> None:
    ours, expected = (results(kind, dtype, adds, **options) for kind in ("cuda", "cpu"))
    assert torch.equal(ours[0], expected[0]), "the sum itself, to the bit"
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert error <= TOLERANCES[dtype], float(error)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("uses_norm", [True, False])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_the_bias_of_a_sublayer_has_the_gradient_of_the_sum_as_it_is_added_to(
    kind: str, uses_norm: bool, dtype: torch.dtype
) -> None:
    """Against autograd, whose bias is added beside the sublayer's output."""
    Device.pick("cpu")
    from mm.model.layers.norm import Residual, RMSNorm

    kernels, found = kernels_of(kind, lambda function: function), []
    for sums_here in (True, False):
        generator = torch.Generator().manual_seed(4)
        rows, added, output, upstream = (torch.randn(ROWS, WIDTH, generator=generator).to(dtype) for _ in range(4))
        rows.requires_grad_()
        weight, bias = (nn.Parameter(torch.randn(WIDTH, generator=generator).to(dtype)) for _ in range(2))
        bias.main_grad = torch.full((WIDTH,), 0.5)
        total, normed = RMSNorm(weight, 1e-6, kernels)(Residual(rows, added), bias if sums_here else None)
        sublayer = normed * 2 + output if uses_norm else output
        added_to = Residual(total, sublayer + (bias.detach() if sums_here else bias)).total()
        (added_to * upstream).sum().backward()
        assert bias.grad is not None
        found.append((rows.grad, weight.grad, bias.main_grad if bias.grad.stride() == (0,) else bias.grad + 0.5))
    for mine, theirs in zip(*found, strict=True):
        if not uses_norm and theirs is None:
            assert mine is None, "the weight's"
            continue
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert error <= TOLERANCES[dtype], float(error)


def test_two_orders_are_one_after_the_other() -> None:
    Device.pick("cpu")
    from mm.model.layers.norm import Residual
    from mm.model.parallel.rows import Permutation

    rows, added = torch.randn(9, 2), torch.randn(9, 2)
    one, two = (Permutation.of(torch.randperm(9)) for _ in range(2))
    found = Residual(rows, added).ordered(one).ordered(two).total()
    assert torch.equal(found, (rows + added)[one.index][two.index])
    assert torch.equal(Residual(rows, added).ordered(one).ordered(one.reversed()).total(), rows + added)


def test_what_is_kept_is_the_sum_and_a_number_for_each_row() -> None:
    Device.pick("cpu")
    from mm.model.layers.norm import Residual, RMSNorm

    kept = []
    norm = RMSNorm(nn.Parameter(torch.ones(WIDTH)), 1e-6, kernels_of("cuda", lambda function: function))
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.shape) or one, lambda one: one):
        norm(Residual(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)))
    assert kept == [(ROWS, WIDTH), (ROWS, 1)]
