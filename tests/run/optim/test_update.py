"""Clipping, guard and Adam in a process group of one, in both forms: inside Adam's kernel, and before it.

That they are right in every layout: tests/test_parity.py.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from mm.batch import StepPlan
from mm.device.cpu import _TorchOnCpu
from mm.device.device import Device
from mm.errors import AgreedError
from mm.weights.shard import joined
from mm.weights.shard import split as split_numbers
from tests.parallel.trace import Trace, counting
from tests.run.setups import LR, plan_of, setup_of
from tests.tiny import hf_model, hf_tensors
from tests.workload import NO_COPIES, OFFLOADED, REMAINDERS, ROUNDED_MOMENTS

if TYPE_CHECKING:
    from mm.run.optim.update import StepResult
    from mm.run.step import Setup

pytestmark = [
    # megatron reads the gradients of the distributed optimizer's slices, as a comment there explains
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.distributed.* is deprecated:FutureWarning"),  # names that megatron uses
]

NORM_TOLERANCE = 1e-6  # measured 0: both are the root of the same sum
CLIPPED_TOLERANCE = 1e-5
"""Adam's kernel divides, megatron multiplies by the inverse; measured 1.5e-6 after two steps by norm of each tensor."""


on_cpu = partial(Device.pick, "cpu")


def as_on_npu() -> Device:
    """The CPU as a device whose Adam ignores ``grad_scale`` and ``found_inf``."""
    return replace(on_cpu(), platform=replace(on_cpu().platform, adam_obeys_scale=False))


FORMS = pytest.mark.parametrize("device_type", [on_cpu, as_on_npu], ids=["folded", "before"])
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])
SPLITS = pytest.mark.parametrize("split", [(), ("--use-distributed-optimizer",)], ids=["plain", "distributed"])


@dataclass
class Engine:
    """The small model with transformers' random weights, one step's data, and megatron's step for comparison."""

    setup: "Setup"
    plan: StepPlan

    def step(self, lr: float = LR) -> "StepResult":
        from mm.run.step import step

        return step(self.setup, self.plan, lr)

    def megatrons_step(self) -> float:
        """The gradient norm."""
        from mm.run.step import forward_backward

        forward_backward(self.setup, self.plan)
        for one in self.setup.optimizer.param_groups:
            one["lr"] = LR
        return self.setup.optimizer.step()[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a step changes: weights, their fp32 copies, moments and step counts."""
        from mm.run.optim.optimizer import owned_states

        found = {name: parameter.detach().clone() for name, parameter in self.setup.stage.named_parameters()}
        for state in owned_states(self.setup.optimizer, self.setup.models):
            found |= {f"{state.name}.{part}": tensor.clone() for part, tensor in state.tensors().items()}
            found[f"{state.name}.step"] = torch.tensor(state.step)
        return found

    def spoil(self, value: float) -> None:
        """Make the gradient of one weight not finite in the next steps."""
        weight = self.setup.stage.get_parameter("text_decoder.decoder.layers.1.mlp.linear_fc2.weight")
        (model,) = self.setup.models
        reduce = model.finish_grad_sync

        def then_spoil(*args, **options):
            reduce(*args, **options)
            weight.main_grad.view(-1)[7] = value

        model.finish_grad_sync = then_spoil


def norm_on_cpu(_chunk: int, _noop: torch.Tensor, tensors: list[list[torch.Tensor]], *_: object) -> tuple:
    """Replaces megatron's fallback without apex, which needs CUDA."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors[0]))).reshape(1), None


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    """The weights with which every engine begins."""
    return hf_tensors(hf_model())


@pytest.fixture
def build(one_rank: Any, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    from megatron.core.optimizer import clip_grads

    # needed by megatron's own step on a CPU, in addition to this project's shims
    monkeypatch.setattr(clip_grads, "torch", _TorchOnCpu("torch"))
    monkeypatch.setattr(clip_grads, "l2_norm_impl", norm_on_cpu)

    def engine(device_type: Any, precision: str, *flags: str) -> Engine:
        flags = flags if precision == "fp32" else (*flags, f"--{precision}")
        return Engine(setup_of(one_rank, *flags, device=device_type(), tensors=tensors), plan_of())

    return engine


@FORMS
@SPLITS
@pytest.mark.parametrize(("precision", "num_reads"), [("fp32", 1), ("bf16", 1), ("fp16", 2)])
def test_the_host_reads_once_per_step(build, device_type: Any, precision: str, num_reads: int, split) -> None:
    """In fp16 megatron also reads whether a gradient overflowed."""
    engine = build(device_type, precision, "--initial-loss-scale", "1024", *split)
    for _ in range(2):
        trace = Trace([])
        with counting(trace, engine.setup.stage):
            assert engine.step().updated
        assert trace.num_read_back == num_reads
        reduced = [one["bytes"] for one in trace.operations if one["bytes"] <= 16]
        assert reduced == [8] + [4] * (precision == "fp16") or reduced == [4] * (precision == "fp16") + [8]


@FORMS
@SPLITS
@pytest.mark.parametrize("moments", [(), ROUNDED_MOMENTS], ids=["fp32", "rounded"])
def test_weights_with_remainders_are_updated_as_their_fp32_copies_would_be(
    build, device_type: Any, split, moments: tuple[str, ...]
) -> None:
    """To the bit, over steps in which the weights of both are rounded alike: ties away from zero."""
    from mm.run.optim.optimizer import MOMENTS, owned_states

    own = build(device_type, "bf16", *split, *moments, *REMAINDERS)
    reference = build(device_type, "bf16", *split, *moments)
    for _ in range(3):
        assert own.step() == reference.step()
        found, expected = own.tensors(), reference.tensors()
        for state in owned_states(reference.setup.optimizer, reference.setup.models):
            weight = reference.setup.stage.get_parameter(state.name).detach().view(-1)[state.start : state.stop]
            master, remainder = state.tensors()["master"], found[f"{state.name}.remainder"]
            assert torch.equal(joined(found[state.name].view(-1)[state.start : state.stop], remainder), master)
            assert all(torch.equal(found[f"{state.name}.{kind}"], expected[f"{state.name}.{kind}"])
                       for kind in (*MOMENTS, "step"))
            split_numbers(master, weight, torch.empty_like(remainder))


@FORMS
@SPLITS
@pytest.mark.parametrize(("precision", "flags"), [
    ("fp32", ()), ("bf16", ()), ("bf16", ROUNDED_MOMENTS), ("bf16", REMAINDERS),
    ("bf16", (*NO_COPIES, *ROUNDED_MOMENTS)), ("fp16", ("--initial-loss-scale", "1024")),
], ids=lambda value: value if isinstance(value, str) else " ".join(value))  # fmt: skip
def test_states_in_host_memory_get_the_same_bits(build, device_type: Any, split, precision: str, flags) -> None:
    """All of them, or half; and a bad step changes none."""
    half = (*OFFLOADED, "--optimizer-offload-fraction", "0.5")
    reference, *engines = (build(device_type, precision, *split, *flags, *more) for more in ((), OFFLOADED, half))
    for _ in range(2):
        result, expected = reference.step(), reference.tensors()
        for engine in engines:
            assert engine.step() == result
            assert_equal(engine.tensors(), expected)
    for engine in engines if precision != "fp16" else ():
        engine.spoil(math.inf)
        with pytest.raises(AgreedError, match="the gradient norm is inf"):
            engine.step()
        assert_equal(engine.tensors(), expected)


def test_a_bad_step_keeps_the_other_of_two_weights_as_near_to_their_copy(build) -> None:
    """As loaded from a checkpoint with remainders, whose ties are rounded away from zero."""
    from mm.run.optim.optimizer import owned_states
    from mm.run.step import step

    engine = build(on_cpu, "bf16", *OFFLOADED)
    engine.step()
    first, *_ = owned_states(engine.setup.optimizer, engine.setup.models)
    weight = engine.setup.stage.get_parameter(first.name).detach().view(-1)
    first.tensors()["master"][0], weight[0] = 1.00390625, 1.0078125
    assert not step(engine.setup, engine.plan, LR, max_norm=1e-9).updated and weight[0] == 1.0078125


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error by norm."""
    difference = float((actual.double() - expected.double()).norm())
    return difference / float(expected.double().norm()) if difference else 0.0


@FORMS
@PRECISIONS
@SPLITS
@pytest.mark.parametrize("clip_grad", [0.0, 1e6, 0.01], ids=["no clipping", "clipping nothing", "clipping"])
def test_the_update_equals_megatrons(build, device_type: Any, precision: str, split, clip_grad: float) -> None:
    """Bit-equal, except for clipping inside Adam's kernel."""
    flags = ("--clip-grad", str(clip_grad), *split)
    own, reference = build(device_type, precision, *flags), build(device_type, precision, *flags)
    for _ in range(2):
        norm, expected_norm = own.step().grad_norm, reference.megatrons_step()
        assert norm == pytest.approx(expected_norm, rel=NORM_TOLERANCE) and (clip_grad != 0.01 or norm > 1)
    found, expected = own.tensors(), reference.tensors()
    is_exact = clip_grad != 0.01 or device_type is as_on_npu
    worst = max(error(found[name], expected[name]) for name in expected)
    assert found.keys() == expected.keys()
    assert worst <= (0.0 if is_exact else CLIPPED_TOLERANCE)


@FORMS
@PRECISIONS
@SPLITS
def test_a_gradient_that_is_not_finite_changes_nothing(build, device_type: Any, precision: str, split) -> None:
    """Weights, their fp32 copies, moments and step counts stay bit-equal."""
    value = math.inf if split else math.nan
    engine = build(device_type, precision, *split)
    engine.step()
    before = engine.tensors()
    engine.spoil(value)
    with pytest.raises(AgreedError, match=f"the gradient norm is {value}: a gradient is not finite, so no weight"):
        engine.step()
    assert_equal(engine.tensors(), before)


@FORMS
@SPLITS
@pytest.mark.parametrize("fault", ["the gradient norm is nan", "the gradient norm is .*, above the limit of 0.001"])
def test_a_bad_step_that_may_be_skipped_changes_nothing(build, device_type: Any, split, fault: str) -> None:
    from mm.run.step import step

    engine = build(device_type, "bf16", *split)
    assert step(engine.setup, engine.plan, LR, max_norm=1e6).fault == ""
    assert step(engine.setup, engine.plan, LR, max_norm=1e200).fault == ""  # whose square is infinite
    before = engine.tensors()
    if fault.endswith("nan"):
        engine.spoil(math.nan)
    found = step(engine.setup, engine.plan, LR, max_norm=math.inf if fault.endswith("nan") else 0.001)
    assert not found.updated and re.match(fault, found.fault)
    assert_equal(engine.tensors(), before)


@FORMS
@SPLITS
def test_a_gradient_that_overflows_under_loss_scaling_skips_the_step(build, device_type: Any, split) -> None:
    engine = build(device_type, "fp16", "--initial-loss-scale", "1024", "--hysteresis", "1", *split)
    assert engine.step().updated
    before = engine.tensors()
    engine.spoil(math.inf)
    skipped = engine.step()
    assert (skipped.updated, skipped.loss_scale, skipped.grad_norm) == (False, 1024.0, 0.0) and skipped.loss > 0
    assert_equal(engine.tensors(), before)
    assert float(engine.setup.optimizer.get_loss_scale()) == 512.0


def test_only_torchs_fused_adam_clips_in_its_kernel() -> None:
    """apex's and TransformerEngine's Adam accept both attributes and ignore them."""
    from mm.run.optim.update import clips_in_adam

    def chained(*optimizers: torch.optim.Optimizer | None) -> SimpleNamespace:
        return SimpleNamespace(chained_optimizers=[
            SimpleNamespace(optimizer=one, param_groups=one and one.param_groups, is_stub_optimizer=one is None)
            for one in optimizers
        ])  # fmt: skip

    weights, device = [torch.nn.Parameter(torch.zeros(2))], Device.pick("cpu")
    fused = torch.optim.AdamW(weights, fused=True)
    assert clips_in_adam(chained(fused, None), device) and clips_in_adam(chained(None), device)
    assert not clips_in_adam(chained(fused, torch.optim.SGD(weights)), device)
    assert not clips_in_adam(chained(fused, torch.optim.AdamW(weights)), device)
    assert not clips_in_adam(chained(fused), as_on_npu())
