"""What a layer keeps for its backward pass.  That it computes the right thing: tests/test_parity.py."""

import json
from pathlib import Path

import pytest
import torch

from mm.device.accumulate import plain_accumulate
from mm.device.device import Device
from tests.launch import run_ranks

NUM_LAYERS = 4 + 4
OTHER_NORMS = 2
"""The projector's and the one before the head, which are no layer's."""


@pytest.mark.parametrize("tp", [1, 2])
def test_selective_recompute_keeps_less_and_changes_no_bit(tp: int, tmp_path: Path) -> None:
    run_ranks(tp, "tests.parallel.selective_worker", str(tmp_path / "found.json"))
    for rank in json.loads((tmp_path / "found.json").read_text()):
        norms, swiglus = 2 * NUM_LAYERS + OTHER_NORMS, NUM_LAYERS
        assert rank["plain"]["kept"] == {"rms_norm": [norms, norms], "swiglu": [swiglus, swiglus]}
        assert rank["selective"]["kept"] == {"rms_norm": [OTHER_NORMS, norms], "swiglu": [0, swiglus]}
        assert rank["selective layernorm"]["kept"] == {"rms_norm": [OTHER_NORMS, norms], "swiglu": [swiglus, swiglus]}
        assert rank["selective mlp_act"]["kept"] == {"rms_norm": [norms, norms], "swiglu": [0, swiglus]}
        assert rank["selective mlp"]["kept"] == {"rms_norm": [norms - NUM_LAYERS, norms], "swiglu": [0, swiglus]}
        assert rank["plain"]["calls"] == {"rms_norm": norms, "swiglu": swiglus}
        assert rank["selective"]["calls"] == {"rms_norm": norms + 2 * NUM_LAYERS, "swiglu": 2 * swiglus}
        assert rank["selective mlp"]["calls"] == {"rms_norm": norms + NUM_LAYERS, "swiglu": 2 * swiglus}
        assert rank["different"] == [] and rank["num_tensors"] > 70


class OurLinear(torch.nn.Linear):
    """With our own arithmetic, which keeps the input and nothing else."""

    def forward(self, x: torch.Tensor, cut: None = None, keys: None = None) -> torch.Tensor:
        from mm.model.linear import linear  # imports megatron, which wants a device

        return linear(x, self.weight, self.bias, plain_accumulate)


def test_a_forgotten_input_is_made_again_only_for_the_weight() -> None:
    Device.pick("cpu")
    from mm.model.layers import Remade, apply_linear

    calls = []

    def make() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return hidden * 2

    linear = OurLinear(3, 5)
    hidden = torch.randn(4, 3, requires_grad=True)
    apply_linear(linear, Remade(make(), make)).sum().backward()
    assert calls == [True, False]
    found = [hidden.grad, linear.weight.grad, linear.bias.grad]
    hidden.grad, linear.weight.grad, linear.bias.grad = None, None, None
    linear(hidden * 2).sum().backward()
    for mine, theirs in zip(found, [hidden.grad, linear.weight.grad, linear.bias.grad], strict=True):
        assert torch.equal(mine, theirs)
    calls.clear()
    apply_linear(linear.requires_grad_(False), Remade(make(), make)).sum().backward()
    assert calls == [True]
