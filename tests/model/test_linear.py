"""The tensor-parallel linear layers on one rank against torch's own.  More ranks: tests/test_parity.py."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from mm.device.device import Device
from tests.tiny import our_config

INPUT, OUTPUT, ROWS = 6, 10, 5


@pytest.fixture(scope="module")
def context():
    """How layers are built in a process group of one."""
    device = Device.pick("cpu")
    from mm.model.layers import LayerContext
    from mm.parallel import mesh as parallel
    from mm.parallel.megatron import parallel_config

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = our_config(((4,),), ((4,),))
    mesh = parallel.build_mesh(config, tp_size=1, timeout=parallel.timedelta(minutes=1))
    yield LayerContext(parallel_config(config, mesh, "fp32"), mesh.groups.tp, device)
    parallel.stop()


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


def run(layer, x: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
    """Forward and backward with a fixed upstream gradient; returns the output."""
    out = layer(x, *shared)
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


def test_a_buffer_of_another_dtype_is_left_to_megatron(make) -> None:
    layer = make(bias=False).bfloat16()
    layer.weight.main_grad = torch.zeros(layer.weight.shape, dtype=torch.float32)
    x = rows().detach().bfloat16().requires_grad_()
    run(layer, x)
    _, x_gradient, weight_gradient = reference(x, layer.weight, None)
    torch.testing.assert_close(x.grad, x_gradient)
    torch.testing.assert_close(layer.weight.grad, weight_gradient)
    assert not layer.weight.main_grad.any()
    assert not getattr(layer.weight, "grad_added_to_main_grad", False)


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


def test_a_shared_weights_gradient_is_left_to_autograd(context) -> None:
    """A tied output layer: the weight is the word embedding, whose lookup adds to the same gradient."""
    layer = context.column(INPUT, OUTPUT, bias=False)
    embedding = torch.randn(OUTPUT, INPUT, requires_grad=True)
    embedding.main_grad = torch.zeros(OUTPUT, INPUT)
    ids = torch.tensor([3, 3, 0, 9, 1])
    x = F.embedding(ids, embedding)
    out = run(layer, x, embedding)

    expected = embedding.detach().clone().requires_grad_()
    torch.testing.assert_close(out, run(F.linear, F.embedding(ids, expected), expected))
    torch.testing.assert_close(embedding.grad, expected.grad)
    assert not embedding.main_grad.any() and not hasattr(embedding, "grad_added_to_main_grad")
