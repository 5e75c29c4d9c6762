"""CUDA's compiled kernel functions on the CPU: the same Inductor compiles them, only its code generator is another."""


from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache

from mm.device import kernels, pointwise
from mm.device.kernels import AddNormKernels, Kernels
from tests.device.marks import on_cuda
from tests.device.test_npu_path import train, worst_error
from tests.device.test_pointwise import fused_projection, tables, with_bias_gradient, with_gradient
from tests.devices import kernels_of

LOSS_TOLERANCE = 1e-6  # measured 0
GRADIENT_TOLERANCE = 1e-5  # measured 1.5e-6, relative, by norm of each gradient
NUM_FUNCTIONS, NUM_TOWERS = 10, 2
"""SwiGLU and rope have two each.  The norm has four: with and without a summand, and with and without a gradient of the
sum.  Rows in another order, and the loss, have one each for a tower."""
LANGUAGE = (2, 2, 12)
"""Groups, heads per group and size of a head in the small model's language model; 144 is the width of its SwiGLU."""


@pytest.fixture(scope="module")
def compiled_kernels() -> Kernels:
    torch._dynamo.reset()
    return kernels_of("cuda")


def compiled_so_far() -> tuple[int, int]:
    """Graphs that were compiled, and kernels that were made of them."""
    return counters["stats"]["unique_graphs"], metrics.generated_kernel_count


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize("operator", ["swiglu", "rope"])
def test_a_function_is_one_kernel_for_any_number_of_rows(compiled_kernels: Kernels, operator: str, where: str) -> None:
    num_graphs, num_kernels = compiled_so_far()
    for rows in (50, 7, 300):
        x = (torch.randn(rows, 144),) if operator == "swiglu" else (fused_projection(LANGUAGE, rows), *tables(12, rows))
        x = [tensor.to(where) for tensor in x]
        ours = with_gradient(getattr(compiled_kernels, operator), *x)
        expected = with_gradient(getattr(kernels_of("cpu"), operator), *x)
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6)  # measured 4.8e-7 for swiglu, 0 for rope
        assert compiled_so_far() == (num_graphs + 2, num_kernels + 2), "forward and backward, from the first rows on"


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize("operator", ["swiglu", "rope"])
def test_the_gradient_of_a_bias_is_summed_by_the_kernel_that_makes_its_rows(
    compiled_kernels: Kernels, operator: str, where: str
) -> None:
    """For any number of rows, of blocks of 64 and of none; what it sums is not rounded before."""
    graphs = []
    for rows in (50, 64, 300, 7, 130, 1, 0):
        before, _ = compiled_so_far()
        x = (torch.randn(rows, 144),) if operator == "swiglu" else (fused_projection(LANGUAGE, rows), *tables(12, rows))
        x = [tensor.to(where) for tensor in x]
        found = with_bias_gradient(getattr(compiled_kernels, operator), *x)
        expected = with_bias_gradient(getattr(kernels_of("cpu"), operator), *x)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=2e-6)  # measured 2.9e-6 for sums of 300
        graphs.append(compiled_so_far()[0] - before)
    assert graphs[1:] == [0, 1, 0, 0, 0, 0], "backward once for one block of rows, and once for more"


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=on_cuda)])
def test_rounding_at_random_is_one_kernel_for_any_number_of_elements(compiled_kernels: Kernels, where: str) -> None:
    graphs = []
    for number in (500, 70, 3000):
        before = compiled_so_far()
        numbers = [torch.randn(number, device=where) for _ in range(2)]
        step = torch.tensor([float(number)], device=where)
        found = compiled_kernels.rounded_at_random(*numbers, step)
        assert torch.equal(found, kernels_of("cpu").rounded_at_random(*numbers, step))
        graphs.append([after - one for after, one in zip(compiled_so_far(), before, strict=True)])
    assert graphs == [[1, 1], [0, 0], [0, 0]]


def both_directions(
    kernels: AddNormKernels, x: Tensor, added: Tensor, total_gradient: Tensor, gradient: Tensor, weight: Tensor,
    index: Tensor | None,
) -> tuple[Tensor, ...]:
    total, normed, factors = kernels.forward(x, added, None, weight, 1e-6, index)
    return total, normed, factors, *kernels.gradient(
        total_gradient, gradient, total, factors, weight, True, True)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize(("orders", "num_graphs"), [(False, 2), (True, 1)], ids=["as they lie", "ordered"])
def test_the_norm_of_a_sum_is_compiled_once_for_any_number_of_rows(
    compiled_kernels: Kernels, orders: bool, num_graphs: int, where: str
) -> None:
    fused, plain, graphs = compiled_kernels.add_norm, kernels_of("cuda", lambda function: function).add_norm, []
    assert fused is not None and plain is not None
    for rows in (50, 7, 300):
        x, added, total_gradient, gradient = (torch.randn(rows, 48, device=where) for _ in range(4))
        weight = torch.randn(1, 48, device=where)
        index = torch.randperm(rows, device=where) if orders else None
        before, _ = compiled_so_far()
        found, expected = (
            both_directions(one, x, added, total_gradient, gradient, weight, index) for one in (fused, plain))
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs).norm() <= 2e-6 * theirs.norm()  # measured 4.4e-7
        graphs.append(compiled_so_far()[0] - before)
    assert graphs == [num_graphs, 0, 0], "forward, and backward for the first, from the first rows on"


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=on_cuda)])
def test_cross_entropy_is_two_kernels_for_any_number_of_rows(compiled_kernels: Kernels, where: str) -> None:
    fused, plain, graphs = compiled_kernels.logits, kernels_of("cuda", lambda function: function).logits, []
    for rows in (50, 7, 300):
        logits, of_rows = torch.randn(rows, 96, device=where).bfloat16(), torch.rand(2, rows, 1, device=where)
        target = torch.randint(96, (rows, 1), device=where)
        before, _ = compiled_so_far()
        found, expected = (
            (*sums, one.gradient(kept, sums[0], of_rows[0], target, of_rows[1], torch.float32))
            for one in (fused, plain) for *sums, kept in [one.forward(logits)])
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=2e-6)  # measured 4.8e-7
        graphs.append(compiled_so_far()[0] - before)
    assert graphs == [2, 0, 0], "forward and backward, from the first rows on"


def test_the_model_trains_the_same_with_compiled_kernel_functions(one_rank: Any, compiled_kernels: Kernels) -> None:
    """Three microbatches of different sizes, so every kernel function sees several numbers of rows."""
    num_graphs, _ = compiled_so_far()
    loss, gradients, _ = train(compiled_kernels, one_rank)
    assert 0 < compiled_so_far()[0] - num_graphs <= NUM_FUNCTIONS * NUM_TOWERS
    expected_loss, expected_gradients, _ = train(kernels_of("cpu"), one_rank)
    assert abs(loss - expected_loss) <= LOSS_TOLERANCE * expected_loss
    assert worst_error(gradients, expected_gradients) <= GRADIENT_TOLERANCE


def swiglu_and_more(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y * 2, pointwise.swiglu(x) + y


def second_of_two(x: torch.Tensor, y: torch.Tensor) -> tuple[None, torch.Tensor]:
    return None, pointwise.swiglu(x) + y


GRADIENT, FORWARD = ((16, 32), (False,)), ((32, 16), ())
"""Widths, and arguments that are no tensors."""


@pytest.mark.parametrize(("function", "arguments"), [
    (pointwise.swiglu_gradient_fusable, GRADIENT), (swiglu_and_more, FORWARD), (second_of_two, FORWARD)])
def test_dynamo_looks_at_the_first_call_of_each_shape_alone(
    function: Any, arguments: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a function gives nothing in some place."""
    marked = []
    real = torch._dynamo.maybe_mark_dynamic
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda x, dim: (marked.append(len(x)), real(x, dim)))
    (fast, (widths, others)) = kernels.compiled(function), arguments
    for rows in (5, 7, 5, 5, 7, 300, 1, 0, 1, 5):
        given = *(torch.randn(rows, width) for width in widths), *others
        for mine, theirs in zip(fast(*given), function(*given), strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6)
    assert marked == [5, 5, 7, 7, 300, 300]  # one row and none run eagerly


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.compile_fault(torch.device("cpu")) is None
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nowhere/c++",))
    with fresh_cache():
        fault = kernels.compile_fault(torch.device("cpu"))
    assert fault is not None and "compiler" in fault.lower()


def test_a_kernel_function_that_cannot_be_compiled_is_an_error() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        kernels.compiled(function)(torch.ones(3))
