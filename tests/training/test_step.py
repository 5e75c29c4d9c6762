"""One optimizer step alone, in a process group of one.  That it is transformers' step: tests/test_parity.py."""

import pytest
import torch
import torch.distributed as dist

from mm.batch import BatchTotals, StepPlan
from mm.device.device import Device
from mm.errors import AgreedError
from tests.tiny import hf_model, hf_tensors, microbatch, our_config, random_sample, whole

LR = 1e-3


@pytest.fixture(scope="module")
def group():
    device = Device.pick("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield device
    dist.destroy_process_group()


@pytest.fixture
def parts(group: Device):
    """The small model with transformers' random weights."""
    from mm.config import flags as arguments
    from mm.model.stage import Stage
    from mm.parallel import mesh as parallel
    from mm.training.step import Parts

    config, tensors = our_config(((4,),), ((4,),)), hf_tensors(hf_model())
    mesh = parallel.build_mesh(config, tp_size=1, timeout=parallel.timedelta(minutes=1))
    stage = Stage(config, mesh, "fp32", group)
    with torch.no_grad():
        for weight in stage.weights:
            stage.get_parameter(weight.name).copy_(whole(weight, tensors))
    args = arguments.parse([
        "--lr", str(LR), "--train-iters", "1", "--micro-batch-size", "1", "--seq-length", "64", "--mm-model", "m",
        "--mm-data", "d",
    ])  # fmt: skip
    yield Parts.build(stage, mesh, args)
    parallel.stop_mesh()


@pytest.fixture
def plan() -> StepPlan:
    generator = torch.Generator().manual_seed(0)
    batch = [microbatch([random_sample(generator, grids, 12)]) for grids in (((1, 4, 6),), ())]
    return StepPlan(tuple(batch), BatchTotals.of(batch, our_config(((4,),), ((4,),)).vision))


def weights_of(parts) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parts.stage.named_parameters()}


def test_steps_change_every_weight_and_lower_the_loss(parts, plan: StepPlan) -> None:
    from mm.training.step import forward_backward, step

    before = weights_of(parts)
    first = step(parts, plan, LR)
    assert (first.lr, first.updated, first.loss_scale) == (LR, True, 1.0)
    assert first.grad_norm > 0
    assert not [name for name, weight in weights_of(parts).items() if torch.equal(weight, before[name])]
    second = step(parts, plan, LR)
    assert second.loss < first.loss
    assert float(forward_backward(parts, plan)) < second.loss


def test_a_learning_rate_of_zero_changes_nothing(parts, plan: StepPlan) -> None:
    from mm.training.step import step

    before = weights_of(parts)
    losses = [step(parts, plan, 0.0).loss for _ in range(2)]
    assert losses[0] == losses[1]
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(parts).items())


def test_a_loss_that_is_not_finite_changes_no_weight(parts, plan: StepPlan) -> None:
    from mm.training.step import step

    with torch.no_grad():
        parts.stage.get_parameter("text_decoder.decoder.final_layernorm.weight")[0] = torch.nan
    before = weights_of(parts)
    with pytest.raises(AgreedError, match="the loss is nan, so no weight was changed by it"):
        step(parts, plan, LR)
    for name, weight in weights_of(parts).items():
        assert torch.equal(weight.nan_to_num(0.5), before[name].nan_to_num(0.5)), name
