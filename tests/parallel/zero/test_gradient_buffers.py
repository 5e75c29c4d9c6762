"""Gradient buffers that no one zeroes: what stood in them before a step must not matter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mm.batch import BatchTotals, StepPlan
from mm.config.lora import LoraConfig
from mm.device.device import Device
from tests.tiny import hf_model, hf_tensors, microbatch, our_config, random_sample, whole

TEXT, PICTURES = (), ((1, 4, 6), (1, 2, 4))
PLANS = {"text, then pictures": (TEXT, PICTURES), "pictures, then text": (PICTURES, TEXT), "text": (TEXT, TEXT)}


CONFIGS = [{}, {"tied": True}, {"freeze": ("language",)}, {"rank": 4}]


def two_steps(mesh: Any, grids: tuple, overwrites: bool, rank: int = 0, **config: Any) -> list[dict[str, Tensor]]:
    """The gradients of the same step twice; before each, NaN stands wherever the step is to write first."""
    from mm.config import args as arguments
    from mm.model.load import set_weight
    from mm.model.stage import Stage
    from mm.run.step import Setup, forward_backward

    model = our_config(((4,),), ((4,),), **config)
    model = replace(model, lora=LoraConfig(("all-linear",), r=rank)) if rank else model
    args = arguments.parse(["--lr", "1e-3", "--train-iters", "1", "--micro-batch-size", "2", "--seq-length", "512",
                            "--mm-model", "m.json", "--mm-data", "d.json"])
    device = Device.pick("cpu")
    device = replace(device, kernels=replace(device.kernels, overwrites=overwrites))
    stage = Stage(model, mesh, "fp32", device)
    tensors = hf_tensors(hf_model(model.language.tied))
    generator = torch.Generator().manual_seed(3)
    for weight in stage.weights:
        if weight.is_adapter:
            stage.get_parameter(weight.name).data.normal_(generator=generator)
            continue
        set_weight(stage, weight, whole(weight, tensors), mesh)
    setup = Setup.build(stage, mesh, args)
    batches = tuple(microbatch([random_sample(generator, one, 12)]) for one in grids)
    plan = StepPlan(batches, BatchTotals.of(list(batches), model.vision))
    trained: dict[str, Any] = {name: p for name, p in stage.named_parameters() if p.requires_grad}
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
    from mm.config import args as arguments
    from mm.model.stage import Stage
    from mm.parallel.zero.reduction import _own_ranges
    from mm.run.step import Setup

    model = replace(our_config(((4,),), ((4,),)), encoder_placement="tensor_ranks")
    args = arguments.parse(["--lr", "1e-3", "--train-iters", "1", "--micro-batch-size", "2", "--seq-length", "512",
                            "--mm-model", "m.json", "--mm-data", "d.json", "--use-distributed-optimizer"])
    setup = Setup.build(Stage(model, one_rank, "fp32", Device.pick("cpu")), one_rank, args)
    ranges = [one for ddp in setup.models for one in _own_ranges(ddp)]
    assert len(ranges) == 1
    for one in ranges:
        one.fill_(1.0)
    for weight in setup.stage.weights:
        gradient: Any = setup.stage.get_parameter(weight.name).main_grad  # pyright: ignore[reportAttributeAccessIssue]
        assert bool((gradient == (weight.part != "language")).all()), weight.name
