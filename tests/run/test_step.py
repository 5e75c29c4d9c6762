"""A single optimizer step in a process group of one.  tests/test_parity.py compares it with transformers."""

from collections import Counter
from typing import Any

import pytest
import torch

from mm.batch import BatchTotals, StepPlan
from mm.device.device import Device
from mm.errors import AgreedError
from mm.weights.fuse import local_shape
from mm.weights.shard import memory_shape
from tests.tiny import hf_model, hf_tensors, microbatch, our_config, random_sample, whole, without_padding
from tests.workload import NO_COPIES, REMAINDERS

LR = 1e-3
BESIDE = {"fp32": ["master"], "remainder": ["remainder"], "none": []}
"""What is kept beside a bf16 weight, by ``Arguments.kept_copy``."""


@pytest.fixture
def parts(one_rank: Any, request: pytest.FixtureRequest):
    """The small model with transformers' random weights; the fixture's parameter adds flags."""
    from mm.config import args as arguments
    from mm.model.load import set_weight
    from mm.model.stage import Stage
    from mm.run.step import Setup

    config, tensors = our_config(((4,),), ((4,),)), hf_tensors(hf_model())
    flags = getattr(request, "param", ())
    stage = Stage(config, one_rank, "bf16" if "--bf16" in flags else "fp32", Device.pick("cpu"))
    for weight in stage.weights:
        set_weight(stage, weight, whole(weight, tensors), one_rank)
    args = arguments.parse([
        "--lr", str(LR), "--train-iters", "1", "--micro-batch-size", "1", "--seq-length", "64", "--mm-model", "m",
        "--mm-data", "d", *flags,
    ])  # fmt: skip
    return Setup.build(stage, one_rank, args)


@pytest.fixture
def plan() -> StepPlan:
    generator = torch.Generator().manual_seed(0)
    batch = [microbatch([random_sample(generator, grids, 12)]) for grids in (((1, 4, 6),), ())]
    return StepPlan(tuple(batch), BatchTotals.of(batch, our_config(((4,),), ((4,),)).vision))


def weights_of(parts) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parts.stage.named_parameters()}


def test_steps_change_every_weight_and_lower_the_loss(parts, plan: StepPlan) -> None:
    from mm.run.step import forward_backward, step

    before = weights_of(parts)
    first = step(parts, plan, LR)
    assert (first.lr, first.updated, first.loss_scale) == (LR, True, 1.0)
    assert first.grad_norm > 0
    assert not [name for name, weight in weights_of(parts).items() if torch.equal(weight, before[name])]
    second = step(parts, plan, LR)
    assert second.loss < first.loss
    assert float(forward_backward(parts, plan)) < second.loss


@pytest.mark.filterwarnings("ignore:.*(reduce_scatter|all_gather_into)_tensor:FutureWarning")  # megatron's calls
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # megatron's too
@pytest.mark.parametrize(
    "parts", [(), ("--use-distributed-optimizer",), ("--bf16",), ("--bf16", "--use-distributed-optimizer"),
              ("--bf16", *REMAINDERS), ("--bf16", "--use-distributed-optimizer", *REMAINDERS), ("--bf16", *NO_COPIES)],
    indirect=True, ids=" ".join,
)  # fmt: skip
def test_padding_is_zero_and_stays_zero(parts, plan: StepPlan) -> None:
    """In weights, gradients, fp32 copies and moments, with weight decay."""
    from mm.run.optim.block_adam import BlockAdam
    from mm.run.optim.optimizer import owned_states
    from mm.run.step import step

    padded = {one.name: one for one in parts.stage.weights if memory_shape(one, 1) != local_shape(one, 1)}
    assert len(padded) == 4 * 3 + 4 * 2  # fc1, its bias in the ViT, and fc2 of every layer
    assert all(group["weight_decay"] > 0 for one in parts.optimizer.chained_optimizers for group in
               one.optimizer.param_groups if any(p.dim() > 1 for p in group["params"]))
    kept = next((one.optimizer.kept.copy for one in parts.optimizer.chained_optimizers
                 if isinstance(one.optimizer, BlockAdam)), "fp32")
    for _ in range(3):
        step(parts, plan, LR)
        kinds = Counter()
        for state in owned_states(parts.optimizer, parts.models):
            parameter = parts.stage.get_parameter(state.name)
            held = {"weight": parameter.detach(), "gradient": parameter.main_grad, **state.tensors()}
            for kind, tensor in held.items() if state.name in padded else ():
                real = without_padding(padded[state.name], tensor.reshape(parameter.shape), tp_size=1)
                kinds[kind] += bool(real.any())
        expected = {"weight", "gradient", "exp_avg", "exp_avg_sq", *BESIDE[kept] * (parameter.dtype != torch.float32)}
        assert kinds == dict.fromkeys(expected, len(padded))


def test_a_loss_that_is_not_finite_changes_no_weight(parts, plan: StepPlan) -> None:
    from mm.run.step import step

    with torch.no_grad():
        parts.stage.get_parameter("text_decoder.decoder.final_layernorm.weight")[0] = torch.nan
    before = weights_of(parts)
    with pytest.raises(AgreedError, match="the loss is nan, so no weight was changed"):
        step(parts, plan, LR)
    for name, weight in weights_of(parts).items():
        assert torch.equal(weight.nan_to_num(0.5), before[name].nan_to_num(0.5)), name
