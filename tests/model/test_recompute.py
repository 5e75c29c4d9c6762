"""The input of a linear layer that is made again in the backward pass."""

import torch

from mm.device.device import Device
from mm.device.kernels import plain_accumulate


class OurLinear(torch.nn.Linear):
    """With our own arithmetic, which keeps the input and nothing else."""

    def forward(self, x: torch.Tensor, cut: None = None, keys: None = None) -> torch.Tensor:
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
