"""Gradient buffers that no one zeroes: what stood in them before a step must not matter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mm.config.lora import LoraConfig
from mm.device.device import Device
from tests.run.setups import SMALL, plan_of, setup_of
from tests.tiny import our_config

TEXT, PICTURES = (), ((1, 4, 6), (1, 2, 4))
PLANS = {"text, then pictures": (TEXT, PICTURES), "pictures, then text": (PICTURES, TEXT), "text": (TEXT, TEXT)}
CONFIGS = [{}, {"tied": True}, {"freeze": ("language",)}, {"rank": 4}]


def two_steps(mesh: Any, grids: tuple, overwrites: bool, rank: int = 0, **config: Any) -> list[dict[str, Tensor]]:
    """The gradients of the same step twice; before each, NaN stands wherever the step is to write first."""
    from mm.run.step import forward_backward

    model = our_config(((4,),), ((4,),), **config)
    model = replace(model, lora=LoraConfig(("all-linear",), r=rank)) if rank else model
    device = Device.pick("cpu")
    setup = setup_of(mesh, model=model, device=replace(device, kernels=replace(device.kernels, overwrites=overwrites)))
    generator, plan = torch.Generator().manual_seed(3), plan_of(*grids, model=model)
    for weight in setup.stage.weights:
        if weight.is_adapter:
            setup.stage.get_parameter(weight.name).data.normal_(generator=generator)
    trained: dict[str, Any] = {name: p for name, p in setup.stage.named_parameters() if p.requires_grad}
    found = []
    for _ in range(2):
        for parameter in trained.values():
            parameter.main_grad.fill_(torch.nan)
        forward_backward(setup, plan)
        found.append({name: p.main_grad.clone() for name, p in trained.items()})
    return found


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_stood_in_a_buffer_does_not_matter(one_rank: Any, name: str, config: dict) -> None:
    written, zeroed = (two_steps(one_rank, PLANS[name], overwrites, **config) for overwrites in (True, False))
    has_pictures = name != "text"
    for step in written:
        assert step.keys() == zeroed[0].keys()
        for weight, gradient in step.items():
            assert torch.equal(gradient, zeroed[0][weight]), weight
            assert has_pictures or "image_encoder" not in weight or not gradient.any()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_weight_that_is_not_zeroed_is_written_by_us(
    one_rank: Any, monkeypatch: pytest.MonkeyPatch, config: dict
) -> None:
    """A gradient that megatron's hook added to a stale buffer would be lost or wrong: there is none to be added."""
    from mm.parallel.zero import reduction

    left = []
    end = reduction.end

    def watch(models: Any) -> None:
        left.extend(name for model in models for name, weight in model.module.named_parameters()
                    if getattr(weight, "main_grad_is_stale", False))
        end(models)

    monkeypatch.setattr(reduction, "end", watch)
    two_steps(one_rank, PLANS["text, then pictures"], True, **config)
    assert left == []


def test_the_ranges_that_tensor_ranks_sum_are_those_of_their_own_rows_and_images(one_rank: Any) -> None:
    """No other weight's gradient is in them, however small the weight; neighbours make one range."""
    from mm.parallel.zero.reduction import _own_ranges

    setup = setup_of(one_rank, "--use-distributed-optimizer", model=replace(SMALL, encoder_placement="tensor_ranks"))
    ranges = [one for ddp in setup.models for one in _own_ranges(ddp)]
    assert len(ranges) == 1
    for one in ranges:
        one.fill_(1.0)
    for weight in setup.stage.weights:
        gradient: Any = setup.stage.get_parameter(weight.name).main_grad  # pyright: ignore[reportAttributeAccessIssue]
        assert bool((gradient == (weight.part != "language")).all()), weight.name
