"""The tensor-parallel linear layers on one rank against torch's own.  More ranks: tests/test_parity.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mm.device.device import Device
from mm.device.kernels import plain_accumulate
from mm.device.pointwise import biased
from tests.tiny import our_config

INPUT, OUTPUT, ROWS = 6, 10, 5


@pytest.fixture(scope="module")
def context(one_rank: Any):
    """How layers are built in a process group of one."""
    device = Device.pick("cpu")
    from mm.model.layers.layer_context import LayerContext
    from mm.parallel.megatron import parallel_config

    settings = parallel_config(our_config(((4,),), ((4,),)), one_rank, "fp32")
    return LayerContext(settings, one_rank.groups.tp, device)


@pytest.fixture(params=["column", "row"])
def make(request: pytest.FixtureRequest, context):
    """Builds a layer with random weights; on one rank nothing is left to be added to its output."""

    def layer(bias: bool):
        module = getattr(context, request.param)(INPUT, OUTPUT, bias)
        if request.param == "row":
            module.register_forward_hook(lambda layer, _, output: biased(output[0], layer.bias))
        else:
            module.register_forward_hook(lambda _, __, output: biased(*output))
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


class LateWork:
    """A collective that runs when it is waited for, and leaves nonsense in its buffers until then."""

    def __init__(self, name: str, run: Callable[[], object], output: torch.Tensor, log: list[str]) -> None:
        self.name, self.run, self.log = name, run, log
        output.fill_(torch.nan)
        log.append(f"start {name}")

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")
        self.run()


class Products(TorchDispatchMode):
    """Notes matrix products."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "addmm_"):
            self.log.append({"mm": "product for x", "addmm_": "product for W"}[name])
        return func(*args, **(kwargs or {}))


GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


# torch 2.13 has new names for both, which 2.11 lacks.
@pytest.mark.filterwarnings("ignore:`torch.distributed.\\w+_tensor` is deprecated:FutureWarning")
@pytest.mark.parametrize("ordered", [False, True], ids=["as they lie", "in another order"])
@pytest.mark.parametrize(
    ("is_trained", "has_input_gradient", "expected"),
    [
        (True, True, [f"start {GATHER}", "product for x", f"wait {GATHER}", f"start {SCATTER}", "product for W",
                      f"wait {SCATTER}"]),
        (True, False, [f"start {GATHER}", f"wait {GATHER}", "product for W"]),
        (False, True, ["product for x", f"start {SCATTER}", f"wait {SCATTER}"]),
    ],
    ids=["both gradients", "of W alone", "of x alone"],
)  # fmt: skip
def test_sequence_parallel_backward_communicates_beside_its_products(
    one_rank: Any, monkeypatch, is_trained: bool, has_input_gradient: bool, expected: list[str], ordered: bool
) -> None:
    """Nothing is read before it has arrived, and the gradients are the same to the bit."""
    from mm.model.layers.linear import linear
    from mm.model.parallel.rows import Permutation
    from mm.model.parallel.sharded_rows import ShardedRows
    from mm.parallel.context import RowShards

    log: list[str] = []

    def late(name: str) -> Callable[..., LateWork | None]:
        collective = getattr(dist, name)

        def begin(output: torch.Tensor, given: torch.Tensor, group: Any, async_op: bool = False) -> LateWork | None:
            run = partial(collective, output, given.detach(), group=group)
            if async_op:
                return LateWork(name, run, output, log)
            log.append(f"{name}, waited for at once")
            return run()

        return begin

    order = Permutation.of(torch.randperm(ROWS)) if ordered else None
    sharded = ShardedRows(RowShards(ROWS, one_rank.groups.tp), order)
    weight = torch.randn(OUTPUT, INPUT, requires_grad=is_trained)
    x, upstream = rows().detach().requires_grad_(has_input_gradient), torch.randn(ROWS, OUTPUT)
    out = linear(x, weight, None, plain_accumulate, one_rank.groups.tp, sharded)
    for name in (GATHER, SCATTER):
        monkeypatch.setattr(dist, name, late(name))
    with Products(log):
        out.backward(upstream)
    assert log == expected
    whole = x.detach() if order is None else x.detach()[order.index]
    if has_input_gradient:
        of_rows = upstream @ weight.detach()
        assert torch.equal(x.grad, of_rows if order is None else of_rows[order.inverse])
    if is_trained:
        assert torch.equal(weight.grad, torch.zeros(OUTPUT, INPUT).addmm_(upstream.t(), whole))
