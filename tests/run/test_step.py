"""A single optimizer step in a process group of one.  tests/test_parity.py compares it with transformers."""

from collections import Counter
from typing import Any

import pytest
import torch

from mm.batch import StepPlan
from mm.errors import AgreedError
from mm.weights.fuse import local_shape
from mm.weights.shard import memory_shape
from tests.run.setups import LR, plan_of, setup_of
from tests.tiny import without_padding
from tests.workload import NO_COPIES, REMAINDERS

BESIDE = {"fp32": ["master"], "remainder": ["remainder"], "none": []}
"""What is kept beside a bf16 weight, by ``Arguments.kept_copy``."""


@pytest.fixture
def parts(one_rank: Any, request: pytest.FixtureRequest):
    """The fixture's parameter adds flags."""
    return setup_of(one_rank, *getattr(request, "param", ()))


@pytest.fixture
def plan() -> StepPlan:
    return plan_of()


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
