"""The learning-rate schedule is Megatron's."""

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.device.device import Device

Device.pick("cpu")

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402

from mm.training.optimizer import LearningRate  # noqa: E402


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
@given(
    warmup=st.integers(0, 50), decay=st.integers(60, 200), step=st.integers(0, 250), min_lr=st.sampled_from([0, 1e-6])
)
def test_schedule_equals_megatron(style: str, warmup: int, decay: int, step: int, min_lr: float) -> None:
    ours = LearningRate(1e-4, min_lr, 1e-7, warmup, decay, style)
    theirs = OptimizerParamScheduler(
        types.SimpleNamespace(param_groups=[]),
        init_lr=1e-7, max_lr=1e-4, min_lr=min_lr, lr_warmup_steps=warmup, lr_decay_steps=decay, lr_decay_style=style,
        start_wd=0.0, end_wd=0.0, wd_incr_steps=1, wd_incr_style="constant",
    )  # fmt: skip
    theirs.num_steps = step
    assert ours.at(step) == pytest.approx(theirs.get_lr({"max_lr": 1e-4, "min_lr": min_lr}), rel=1e-12, abs=1e-18)
