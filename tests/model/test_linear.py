"""The tensor-parallel linear layers on one rank against torch's own.  More ranks: tests/test_parity.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mm.device.accumulate import cpu_accumulate
from mm.device.device import Device
from tests.tiny import our_config

INPUT, OUTPUT, ROWS = 6, 10, 5


@pytest.fixture(scope="module")
def context(one_rank: Any):
    """How layers are built in a process group of one."""
    device = Device.pick("cpu")
    from mm.model.layers import LayerContext
    from mm.parallel.megatron import parallel_config

    settings = parallel_config(our_config(((4,),), ((4,),)), one_rank, "fp32")
    return LayerContext(settings, one_rank.groups.tp, device)


@pytest.fixture(params=["column", "row"])
def make(request: pytest.FixtureRequest, context):
    """Builds a layer with random weights."""

    def layer(bias: bool):
        module = getattr(context, request.param)(INPUT, OUTPUT, bias)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()
        return module

    return layer


def run(layer, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Forward and backward with a fixed upstream gradient; returns the output."""
    out = layer(x, *weights)
    out.backward(torch.arange(out.numel(), dtype=out.dtype).view_as(out) / out.numel())
    return out


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Output and gradients of x, weight and bias by ``torch.nn.functional.linear``."""
    leaves = [part.detach().clone().requires_grad_() for part in (x, weight, bias) if part is not None]
    out = run(F.linear, *leaves)
    return (out.detach(), *(leaf.grad for leaf in leaves))


def rows() -> torch.Tensor:
    return torch.randn(ROWS, INPUT, requires_grad=True)


@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_gradients(make, bias: bool) -> None:
    layer, x = make(bias), rows()
    out = run(layer, x)
    found = [out, x.grad, layer.weight.grad] + ([layer.bias.grad] if bias else [])
    for ours, expected in zip(found, reference(x, layer.weight, layer.bias), strict=True):
        torch.testing.assert_close(ours, expected)


def test_the_weight_gradient_is_added_to_megatrons_buffer(make) -> None:
    layer, batches = make(bias=True), [rows(), rows()]
    layer.weight.main_grad = torch.full_like(layer.weight, 2.0).detach()
    expected = layer.weight.main_grad.clone()
    for x in batches:
        run(layer, x)
        _, x_gradient, weight_gradient, _ = reference(x, layer.weight, layer.bias)
        expected += weight_gradient
        torch.testing.assert_close(x.grad, x_gradient)
    torch.testing.assert_close(layer.weight.main_grad, expected)
    assert layer.weight.grad_added_to_main_grad, "megatron's hook would add the stand-in gradient too"
    assert layer.weight.grad is not None, "megatron's hook is not called without a gradient"


def test_gradients_of_bfloat16_are_added_in_float32(make) -> None:
    """They are 1 and 1/512, whose sum bfloat16 has not."""
    layer = make(bias=False).bfloat16()
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    for value in (1.0, 1 / 512):
        x = torch.full((1, INPUT), value, dtype=torch.bfloat16)
        layer(x).backward(torch.ones(1, OUTPUT, dtype=torch.bfloat16))
    assert torch.equal(layer.weight.main_grad, torch.full((OUTPUT, INPUT), 1 + 1 / 512))


def test_without_megatrons_buffer_the_gradient_is_an_ordinary_one(make) -> None:
    layer = make(bias=False).bfloat16()
    x = rows().detach().bfloat16().requires_grad_()
    run(layer, x)
    _, x_gradient, weight_gradient = reference(x, layer.weight, None)
    torch.testing.assert_close(x.grad, x_gradient)
    torch.testing.assert_close(layer.weight.grad, weight_gradient)
    assert not hasattr(layer.weight, "grad_added_to_main_grad")


def test_the_stand_in_for_the_gradient_takes_no_memory(make) -> None:
    layer = make(bias=False)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    run(layer, rows())
    assert layer.weight.grad.untyped_storage().nbytes() == layer.weight.element_size()


@pytest.mark.parametrize("kind", ["column", "row"])
def test_the_product_is_the_devices(context, kind: str) -> None:
    calls = []

    def accumulate(buffer: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor) -> None:
        calls.append((buffer.shape, gradient.shape, x.shape))
        cpu_accumulate(buffer, gradient, x)

    kernels = replace(context.device.kernels, accumulate=accumulate)
    context = replace(context, device=replace(context.device, kernels=kernels))
    layer = getattr(context, kind)(INPUT, OUTPUT, False)
    layer(rows()).sum().backward()
    assert calls == [((OUTPUT, INPUT), (ROWS, OUTPUT), (ROWS, INPUT))]


def test_a_weight_of_more_axes_is_a_matrix() -> None:
    """The patch projection, whose weight keeps the shape of a convolution."""
    weight = torch.randn(OUTPUT, 3, 2, requires_grad=True)
    weight.main_grad = torch.zeros(OUTPUT, 3, 2)
    x = rows()
    from mm.model.linear import linear

    out = linear(x, weight, None, cpu_accumulate)
    out.backward(torch.ones_like(out))
    expected = reference_by_ones(x, weight)
    for ours, theirs in zip((out, x.grad, weight.main_grad.flatten(1)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def reference_by_ones(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    ones = torch.ones(ROWS, OUTPUT)
    return x @ weight.flatten(1).t(), ones @ weight.flatten(1), ones.t() @ x


def test_a_frozen_layer_passes_the_gradient_on_and_keeps_no_input(make) -> None:
    layer, x = make(bias=True).requires_grad_(False), rows()
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(x)
    assert not [tensor for tensor in kept if tensor.shape == x.shape]
    upstream = torch.randn_like(out)
    out.backward(upstream)
    torch.testing.assert_close(x.grad, upstream @ layer.weight)
    assert layer.weight.grad is None and layer.bias.grad is None and not layer.weight.main_grad.any()


def test_a_frozen_layer_without_gradient_behind_it_makes_no_graph(make) -> None:
    assert not make(bias=True).requires_grad_(False)(rows().detach()).requires_grad


def test_trainable_rows_of_data_need_no_input_gradient(make) -> None:
    layer, x = make(bias=False), rows().detach()
    run(layer, x)
    torch.testing.assert_close(layer.weight.grad, reference(x, layer.weight, None)[2])
