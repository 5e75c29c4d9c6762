"""Updates with groups equal those of torch's AdamW with the same groups, in a process group of one.

In other layouts: tests/test_parity.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mm.config.model import Rates
from tests.run.setups import LR, SMALL, plan_of, setup_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # megatron's
    pytest.mark.filterwarnings("ignore:.*torch.distributed.* is deprecated:FutureWarning"),
]

VISION_LR, PROJECTOR_LR, DECAY, PROJECTOR_DECAY = 1e-5, 3e-3, 0.1, 0.4
UPDATE_TOLERANCE = 1e-5  # of the difference of two steps, by norm of each tensor; measured 8.8e-7


def settings(name: str) -> tuple[float, float]:
    """Learning rate and weight decay by weight name, computed independently of ``mm.weights.trained``."""
    if name.startswith("image_encoder.projector"):
        lr, decay = PROJECTOR_LR, PROJECTOR_DECAY
    elif name.startswith("image_encoder"):
        lr, decay = VISION_LR, DECAY
    else:
        lr, decay = LR, DECAY
    if name.endswith(".bias") or "norm" in name or "word_embeddings" in name:
        decay = 0.0
    return lr * (0.5 if "linear_qkv" in name else 1.0), decay


@pytest.fixture(params=[(), ("--use-distributed-optimizer",)], ids=["plain", "distributed"])
def parts(one_rank: Any, request: pytest.FixtureRequest):
    model = replace(SMALL, vision=replace(SMALL.vision, rates=Rates(VISION_LR)),
                    projector=replace(SMALL.projector, rates=Rates(PROJECTOR_LR, PROJECTOR_DECAY)))
    return setup_of(one_rank, "--weight-decay", str(DECAY), "--clip-grad", "0", "--lr-scale-modules", "Linear_QKV",
                    "--lr-mult", "0.5", "--weight-decay-exclude-modules", "word_embeddings", *request.param,
                    model=model)


def test_each_trained_parameter_is_only_in_its_group(parts) -> None:
    from mm.run.optim.optimizer import owned_states

    states = owned_states(parts.optimizer, parts.models)
    assert sorted(state.name for state in states) == sorted(name for name, _ in parts.stage.named_parameters())
    for state in states:
        lr, decay = settings(state.name)
        assert LR * state.group["lr_mult"] == pytest.approx(lr, rel=1e-12) and state.group["weight_decay"] == decay
    assert sum(bool(group["params"]) for group in parts.optimizer.param_groups) == len(set(map(settings, (
        state.name for state in states)))) == 10


def test_two_steps_equal_torchs_adamw(parts) -> None:
    """The second step has half the learning rate, as if scheduled, so every group's rate is halved."""
    from mm.run.optim.update import update
    from mm.run.step import forward_backward

    live = dict(parts.stage.named_parameters())
    updated = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in live.items()}
    start = {name: parameter.detach().clone() for name, parameter in live.items()}
    groups = [{"params": [one], "lr": settings(name)[0], "weight_decay": settings(name)[1]}
              for name, one in updated.items()]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, fused=False, foreach=False)
    for factor in (1.0, 0.5):
        loss = forward_backward(parts, plan_of())
        for (name, parameter), group in zip(updated.items(), adam.param_groups, strict=True):
            parameter.grad = live[name].main_grad.clone()
            group["lr"] = settings(name)[0] * factor
        adam.step()
        update(parts.optimizer, loss, LR * factor, parts.mesh, parts.stage.device)
        moved = {name: updated[name].detach() - start[name] for name in updated}
        errors = {name: float((live[name].detach() - updated[name].detach()).norm() / moved[name].norm())
                  for name in updated}
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= UPDATE_TOLERANCE, (worst, errors[worst])
