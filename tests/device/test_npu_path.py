"""The NPU path against the stand-in torch_npu: how the device is picked, and the whole model on the NPU's kernels.

What it cannot show: the operators' own arithmetic and speed, and HCCL.  Those need an NPU.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mm.batch import BatchTotals, StepPlan
from mm.device.device import Device
from mm.device.kernels import Kernels
from tests.devices import kernels_of
from tests.tiny import hf_model, hf_tensors, microbatch, our_config, random_sample, whole

STAND_INS = Path(__file__).parents[1] / "stand_ins"

LOSS_TOLERANCE = 1e-6  # measured 0
GRADIENT_TOLERANCE = 1e-5  # measured 2.0e-6, relative, by norm of each gradient
# measured 4.2e-6: Adam's first update is the sign of the gradient, and rounding decides the sign of some elements
WEIGHT_TOLERANCE = 1e-4


# Picking the device, in forks of a process of its own: it patches torch

PICK = """
import json, os, sys
from mm.device.device import Device

def picked(wanted):
    device = Device.pick(wanted)
    before = sys.modules["torch_npu.contrib.transfer_to_npu"].LOADED_BEFORE
    import torch
    found = {
        "kind": device.platform.name, "index": device.index, "backend": device.platform.backend, "name": device.name,
        "torch_device": str(device.torch_device), "chosen": torch.npu.current_device(),
        "megatron asks for": torch.cuda.current_device(), "megatron was there before": "megatron" in before,
        "attention": device.kernels.attention.__name__, "rms_norm": device.kernels.rms_norm.__name__,
        "swiglu": device.kernels.swiglu.__name__, "memory": device.runtime.max_memory_bytes(),
    }
    device.runtime.synchronize()
    return found

for words in sys.argv[1:]:
    wanted, os.environ["LOCAL_RANK"] = words.split()
    child = os.fork()
    if child == 0:
        try:
            print(json.dumps([words, picked(wanted)]), flush=True)
        except Exception as error:
            print(json.dumps([words, str(error)]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def picked() -> dict[str, Any]:
    """By the wanted device and the local rank, the device that is picked, or the error."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(STAND_INS)])
    done = subprocess.run(
        [sys.executable, "-c", PICK, "npu 1", "auto 1", "npu 5"], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("wanted", ["npu", "auto"])
def test_the_npu_is_picked_and_prepared_before_megatron(picked: dict[str, Any], wanted: str) -> None:
    assert picked[f"{wanted} 1"] == {
        "kind": "npu", "index": 1, "backend": "hccl", "name": "Ascend910B3", "torch_device": "npu:1", "chosen": 1,
        "megatron asks for": 1, "megatron was there before": False,
        "attention": "npu_attention", "rms_norm": "npu_rms_norm", "swiglu": "npu_swiglu", "memory": 0,
    }  # fmt: skip


def test_an_npu_that_is_not_there_is_an_error(picked: dict[str, Any]) -> None:
    assert "this rank is number 5 on its machine (LOCAL_RANK), which has 2 npu devices" in picked["npu 5"]


# The whole model on the NPU's kernels


@pytest.fixture(scope="module")
def npu_kernels(torch_npu: object) -> Kernels:
    return kernels_of("npu")


GRIDS = ((), ((1, 4, 6),), ((1, 6, 10), (1, 2, 4)), (), ((2, 8, 4),), ())


def train(kernels: Kernels, mesh: Any, freeze: tuple[str, ...] = ()) -> tuple[float, dict, dict]:
    """One step of the small model on one stage: loss, gradients and updated weights by name."""
    from mm.config import args as arguments
    from mm.model.load import set_weight
    from mm.model.stage import Stage
    from mm.run.optim.update import update
    from mm.run.step import Setup, forward_backward

    config = our_config(((4,),), ((4,),), freeze=freeze)
    args = arguments.parse([
        "--lr", "1e-3", "--train-iters", "1", "--micro-batch-size", "2", "--seq-length", "512",
        "--mm-model", "m.json", "--mm-data", "d.json",
    ])  # fmt: skip
    device = dataclasses.replace(Device.pick("cpu"), kernels=kernels)
    stage = Stage(config, mesh, "fp32", device)
    tensors = hf_tensors(hf_model())
    for weight in stage.weights:
        set_weight(stage, weight, whole(weight, tensors), mesh)
    setup = Setup.build(stage, mesh, args)
    generator = torch.Generator().manual_seed(3)
    samples = [random_sample(generator, grids, 10 + 4 * index) for index, grids in enumerate(GRIDS)]
    batches = tuple(microbatch(samples[start : start + 2]) for start in range(0, len(samples), 2))
    plan = StepPlan(batches, BatchTotals.of(list(batches), config.vision))
    loss = forward_backward(setup, plan)
    trained = {name: p for name, p in stage.named_parameters() if p.requires_grad}
    gradients = {name: p.main_grad.clone() for name, p in trained.items()}
    result = update(setup.optimizer, loss, 1e-3, mesh, device)
    return result.loss, gradients, {name: p.detach().clone() for name, p in trained.items()}


def worst_error(ours: dict, expected: dict) -> float:
    """Largest relative error of a tensor, by norm."""
    assert ours.keys() == expected.keys() and ours
    return max(float((ours[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


@pytest.mark.parametrize("freeze", [(), ("vision", "language")], ids=["everything", "only the projector"])
def test_the_model_trains_the_same_on_the_npu_kernels(one_rank: Any, npu_kernels: Kernels, freeze: tuple) -> None:
    loss, gradients, weights = train(npu_kernels, one_rank, freeze)
    expected_loss, expected_gradients, expected_weights = train(kernels_of("cpu"), one_rank, freeze)
    assert abs(loss - expected_loss) <= LOSS_TOLERANCE * expected_loss
    assert worst_error(gradients, expected_gradients) <= GRADIENT_TOLERANCE
    assert worst_error(weights, expected_weights) <= WEIGHT_TOLERANCE


def test_every_operator_of_the_npu_is_used(one_rank: Any, npu_kernels: Kernels, torch_npu: object, monkeypatch) -> None:
    """So that the test above does not compare the CPU's kernels with themselves."""
    calls = Counter()
    for name in ("npu_fusion_attention", "npu_rms_norm", "npu_swiglu", "npu_rotary_mul"):
        operator = getattr(torch_npu, name)

        @functools.wraps(operator)
        def counted(*args, _name=name, _operator=operator, **kwargs):
            calls[_name, args[4] if len(args) > 4 else None] += 1
            return _operator(*args, **kwargs)

        monkeypatch.setattr(torch_npu, name, counted)
    train(npu_kernels, one_rank)
    num_vision_calls, num_language_calls = 4 * 3, 4 * 3  # layers x microbatches; all three have images
    assert calls["npu_swiglu", None] == num_vision_calls + num_language_calls
    assert calls["npu_rms_norm", None] == 2 * (num_vision_calls + num_language_calls) + 3 + 3  # projector, final norm
    assert calls["npu_rotary_mul", None] == 4 * (num_vision_calls + num_language_calls)  # q and k, forward and backward
    assert calls["npu_fusion_attention", "TND"] >= num_language_calls
    assert calls["npu_fusion_attention", "BSND"] > 0
