"""Inputs that are made again in the backward pass, and activations in host memory on a device whose side stream is
late: copies are made when somebody waits for them.
"""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mm.device.cpu import CPU, HostRuntime
from mm.device.device import Device
from mm.device.kernels import plain_accumulate
from mm.errors import UserError
from mm.model import recompute
from mm.model.recompute import HostActivations, HostPages, LayerActivations, on_pages
from tests.stand_ins.late import late_device


class OurLinear(torch.nn.Linear):
    """With our own arithmetic, which keeps the input and nothing else."""

    def forward(self, x: torch.Tensor, sharded: None = None, keys: None = None) -> torch.Tensor:
        from mm.model.layers.linear import linear

        return linear(x, self.weight, self.bias, plain_accumulate)


def test_a_forgotten_input_is_made_again_only_for_the_weight() -> None:
    Device.pick("cpu")
    from mm.model.recompute import Remade, apply_linear

    calls = []

    def make(made_from: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return made_from * 2

    linear = OurLinear(3, 5)
    hidden = torch.randn(4, 3, requires_grad=True)
    apply_linear(linear, Remade(make(hidden), make, hidden)).sum().backward()
    assert calls == [True, False]
    found = [hidden.grad, linear.weight.grad, linear.bias.grad]
    hidden.grad, linear.weight.grad, linear.bias.grad = None, None, None
    linear(hidden * 2).sum().backward()
    for mine, theirs in zip(found, [hidden.grad, linear.weight.grad, linear.bias.grad], strict=True):
        assert torch.equal(mine, theirs)
    calls.clear()
    apply_linear(linear.requires_grad_(False), Remade(make(hidden), make, hidden)).sum().backward()
    assert calls == [True]


PAGE_BYTES, ROWS, WIDTH = 1024, 24, 16
ROW_BYTES = 4 * ROWS * WIDTH
LAYER_BYTES = ROW_BYTES * (1 + 3 + 1 + 1)
"""What ``layer`` keeps: its input, the heads, which lie in one block, a product of two, and its output."""


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "PAGE_BYTES", PAGE_BYTES)
    monkeypatch.setattr(recompute, "SEGMENT_BYTES", 16 * PAGE_BYTES)


WEIGHTS = [torch.nn.Parameter(torch.randn(3 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(layer)) / 4)
           for layer in range(4)]
TABLE = torch.linspace(0.5, 1.5, ROWS)[:, None]


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """It keeps, besides activations, a weight and a table that all layers share."""
    q, k, v = (x @ weight.T).chunk(3, dim=-1)
    return torch.tanh(q * k * v * TABLE + x)


def plain(x: Tensor) -> list[Tensor]:
    """The gradients of the weights and of ``x``."""
    x = x.clone().requires_grad_()
    out = x
    for weight in WEIGHTS:
        out = layer(out, weight)
    return list(torch.autograd.grad(out.square().sum(), [*WEIGHTS, x]))


class Pass:
    """One microbatch."""

    def __init__(self, host: HostActivations, x: Tensor, num_offloaded: int) -> None:
        self.x = x.clone().requires_grad_()
        out, before = self.x, None
        for number, weight in enumerate(WEIGHTS):
            if number > num_offloaded:
                out = layer(out, weight)
                host.arrived()
                continue
            shared = (TABLE, *([out] if number == 0 else []))
            with host.layer(before, number < num_offloaded, shared) as own:
                out = layer(out, weight)
            before = own
        self.output: Any = out.grad_fn
        self.loss = out.square().sum()

    def gradients(self) -> list[Tensor]:
        return list(torch.autograd.grad(self.loss, [*WEIGHTS, self.x]))


ORDERS = {"one": "f0 b0", "two": "f0 f1 b0 f2 b1 b2", "all first": "f0 f1 f2 b0 b1 b2", "last first": "f0 f1 b1 b0",
          "one without a backward pass": "f0 f1 x0 f2 b1 b2", "one whose backward pass ends early": "f0 f1 e0 f2 b1 b2",
          "validation between": "f0 v f1 b0 v b1"}  # fmt: skip


@pytest.mark.parametrize("num_offloaded", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_are_those_without_it(order: str, num_offloaded: int) -> None:
    device, passes, found = late_device(), dict[str, Pass](), list[int]()
    host = HostActivations(device)
    for step in range(3):
        for action, name in ((one[0], one[1:]) for one in ORDERS[order].split()):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + int(name or 0)))
            if action == "f":
                passes[name] = Pass(host, x, num_offloaded)
            elif action == "x":
                del passes[name]
            elif action == "e":
                torch.autograd.grad(passes.pop(name).loss, WEIGHTS[-1])
            elif action == "v":
                with torch.no_grad():
                    Pass(host, x, num_offloaded)
            else:
                mine = passes.pop(name).gradients()
                assert all(torch.equal(*both) for both in zip(mine, plain(x), strict=True))
        found.append(host.pages.num_bytes)
        assert len(host.pages._free) * PAGE_BYTES == host.pages.num_bytes  # all were given back
    assert device.runtime.num_after_free == 0
    assert len(set(found)) == 1


def test_two_layers_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """During a layer's backward pass, its own activations and those of the layer before."""
    host, memories, found = HostActivations(late_device()), weakref.WeakSet[Any](), list[int]()
    after_output: list[int] = []
    made, bring = recompute._Memory.__init__, host.bring

    def counted(self: Any, tensor: Tensor) -> None:
        made(self, tensor)
        memories.add(self)

    def here() -> int:
        return sum(one.num_bytes for one in memories if one._here is not None)

    def watched(own: LayerActivations) -> None:
        bring(own)
        found.append(here())

    monkeypatch.setattr(recompute._Memory, "__init__", counted)
    monkeypatch.setattr(host, "bring", watched)
    one, other = (Pass(host, torch.randn(ROWS, WIDTH), 4) for _ in range(2))
    assert here() == LAYER_BYTES  # the last one has not left
    assert sum(memory.num_bytes for memory in memories) == 8 * LAYER_BYTES - 2 * ROW_BYTES  # inputs of the first

    def backward(given: Pass) -> None:
        given.output.next_functions[0][0].register_prehook(lambda _: after_output.append(here()))
        given.gradients()

    backward(one)
    backward(Pass(host, torch.randn(ROWS, WIDTH), 4))  # whose last layer is still there
    backward(other)
    assert max(found) == 2 * LAYER_BYTES and here() == 0 and host._held == []
    assert after_output == [2 * LAYER_BYTES - ROW_BYTES] * 3  # each block goes with its last use


def test_shared_tensors_weights_and_numbers_stay() -> None:
    host = HostActivations(late_device())
    own = LayerActivations(host, None, True, (TABLE,))
    for tensor in (TABLE, TABLE[:4], WEIGHTS[0], WEIGHTS[0].T, torch.arange(5), torch.ones(3, device="meta")):
        assert own.keep(tensor)().data_ptr() == tensor.data_ptr()
    assert own.memories() == []
    own.keep(torch.ones(3))
    assert [memory.num_bytes for memory, _ in own.memories()] == [12]


@given(st.lists(st.integers(0, 5000), max_size=6), st.sampled_from((64, 1024)))
def test_every_byte_has_a_place_of_its_own(sizes: list[int], page_bytes: int) -> None:
    start, places = 0, set[tuple[int, int]]()
    for num_bytes in sizes:
        done = 0
        for page, there, here in on_pages(start, num_bytes, page_bytes):
            assert here.start == done and here.stop - here.start == there.stop - there.start > 0
            assert there.start >= 0 and there.stop <= page_bytes and page * page_bytes + there.start == start + done
            places |= {(page, one) for one in range(there.start, there.stop)}
            done = here.stop
        assert done == num_bytes
        start += num_bytes
    assert len(places) == sum(sizes)


def test_too_little_host_memory_is_named() -> None:
    class Full(HostRuntime):
        def host_buffer(self, num_bytes: int) -> Tensor | None:
            raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(UserError, match="--cpu-offload-activations keeps the activations of this rank in host memory"):
        HostPages(replace(Device.pick("cpu"), platform=replace(CPU, runtime=Full))).take(1)
