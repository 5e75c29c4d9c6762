"""The trainer on the fake NPU equals the trainer on the CPU: losses, norms, checkpoints and the exported model.

The whole program runs, from the command line to the export, through megatron-core, with tensors that say ``npu:0``.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.files import ROOT, json_lines
from tests.launch import run_ranks
from tests.tiny_inputs import write_inputs

NUM_ITERATIONS = 2
LAYOUTS = {  # name: (processes, model JSON, what the same run on the CPU is called, more flags)
    "fp32": (1, "model_1", "fp32", ()),
    "bf16": (1, "model_1", "bf16", ("--bf16", "--num-workers", "1", "--optimizer-cpu-offload",
                                     "--cpu-offload-activations")),
    "frozen": (1, "model_frozen", "frozen", ("--use-distributed-optimizer",)),
    "pp2": (2, "model_2", "fp32", ("--profile-pipeline", "2", "--log-timers", "--cpu-offload-activations")),
    "tp2-bf16": (2, "model_1", "bf16", ("--bf16", "--tensor-model-parallel-size", "2", "--use-distributed-optimizer",
                                        "--store-param-remainders", "--optimizer-cpu-offload")),
    "tp2-sequence": (2, "model_1", "fp32", ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "tp2-whole-encoder": (2, "model_whole", "fp32", ("--tensor-model-parallel-size", "2")),
    "cp2-ulysses": (2, "model_1", "fp32", ("--context-parallel-size", "2", "--optimizer-cpu-offload",
                                           "--optimizer-offload-fraction", "0.5")),
    "cp2-ring-bf16": (2, "model_1", "bf16", ("--bf16", "--context-parallel-size", "2", "--context-parallel-algo",
                                             "megatron_cp_algo", "--use-distributed-optimizer")),
    "dp2": (2, "model_1", "fp32", ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")),
    "dp2-shards": (2, "model_1", "fp32", ("--data-parallel-sharding-strategy", "optim_grads", "--overlap-grad-reduce")),
    "dp2-weight-shards": (2, "model_1", "bf16", (
        "--bf16", "--data-parallel-sharding-strategy", "optim_grads_params", "--overlap-grad-reduce",
        "--overlap-param-gather", "--cpu-offload-activations", "--recompute-granularity", "full", "--recompute-method",
        "uniform", "--recompute-num-layers", "1")),
}
REFERENCES = ("fp32", "bf16", "frozen")
TOLERANCES = {
    # of loss, gradient norm and exported weights, relative
    "fp32": (1e-5, 1e-5, 1e-5),  # measured 1.5e-7, 2.9e-7, 1.6e-6
    "bf16": (1e-2, 1e-2, 1e-2),  # measured 1.2e-3, 3.8e-3, 1.2e-3
}
AT_THE_START = ("all_gather_object", "buffer.unique().tolist()")
"""megatron compares its parameter groups, and one operator is tried on a small product."""
AT_A_SAVE = ("checkpoint.py", 'return int(state["step"]', "copy_(tensor, non_blocking=True)",
             "copies[weight.name].copy_(values)")
"""The third copies a block into pinned memory, which on a device does not wait; the last is of weights in shards."""


def flags(inputs: Path, device: str, name: str, model: str, *more: str) -> list[str]:
    folder = inputs / device / name
    return [
        "--device", device, "--mm-model", str(inputs / f"{model}.json"), "--mm-data", str(inputs / "data.json"),
        "--micro-batch-size", "1", "--global-batch-size", "2", "--seq-length", "512", "--train-iters",
        str(NUM_ITERATIONS), "--lr", "1e-3", "--seed", "3", "--log-interval", "1", "--num-workers", "0",
        "--clip-grad", "1.0", "--calculate-per-token-loss", "--save", str(folder / "save"),
        "--log-dir", str(folder / "logs"), "--export-hf", str(folder / "hf"), *more,
    ]  # fmt: skip


def write_runs(inputs: Path, device: str, names: list[str]) -> str:
    """The file of the runs ``names`` of LAYOUTS; on the NPU the first of them also stops and goes on."""
    runs = []
    for name in names:
        _, model, _, more = LAYOUTS[name]
        start = flags(inputs, device, name, model, *more)
        hf = ("--load", str(inputs / "hf"))
        if device == "npu" and name == names[0]:
            runs.append({"name": f"{name}-first", "flags": [*start, *hf, "--exit-interval", "1"]})
            hf = ("--load", str(inputs / device / name / "save"))
        runs.append({"name": name, "flags": [*start, *hf]})
    file = inputs / f"{device}_{names[0]}.json"
    file.write_text(json.dumps(runs))
    (inputs / device).mkdir(exist_ok=True)
    return str(file)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs have left what they made."""
    inputs = write_inputs(tmp_path_factory.mktemp("npu"))
    model = json.loads((inputs / "model_1.json").read_text())
    (inputs / "model_whole.json").write_text(json.dumps(model | {"encoder_placement": "tensor_ranks"}))
    model["image_encoder"]["vision_encoder"]["freeze"] = True
    (inputs / "model_frozen.json").write_text(json.dumps(model))
    run_ranks(1, "tests.device.npu_worker", str(inputs / "cpu"), write_runs(inputs, "cpu", list(REFERENCES)))
    on_npu = [write_runs(inputs, "npu", [name for name, one in LAYOUTS.items() if one[0] == num_ranks])
              for num_ranks in (1, 2)]
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.device.npu_worker", "npu", inputs / "npu",
                           *on_npu], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return inputs


def metrics(inputs: Path, device: str, name: str) -> list[dict]:
    return json_lines(inputs / device / name / "logs" / "metrics.jsonl")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_equals_that_of_the_cpu(inputs: Path, name: str) -> None:
    reference = LAYOUTS[name][2]
    loss, norm, weights = TOLERANCES["bf16" if reference == "bf16" else "fp32"]
    ours, expected = metrics(inputs, "npu", name), metrics(inputs, "cpu", reference)
    assert [row["iteration"] for row in ours] == list(range(1, NUM_ITERATIONS + 1))
    assert any(row["num_patches"] for row in ours)
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=loss)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=norm)
    ours, expected = (load_file(inputs / device / one / "hf" / "model.safetensors")
                      for device, one in (("npu", name), ("cpu", reference)))
    assert {key: tensor.dtype for key, tensor in ours.items()} == {key: one.dtype for key, one in expected.items()}
    # all weights as one vector: Adam's update is the sign of a gradient that is zero but for rounding (a key's bias)
    difference = sum(float((ours[key] - expected[key]).double().square().sum()) for key in ours)
    assert difference**0.5 <= weights * sum(float(one.double().square().sum()) for one in expected.values()) ** 0.5


def results(inputs: Path, name: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((inputs / "npu").glob(f"{name}_[0-9].json"))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_host_reads_the_device_once_a_step(inputs: Path, name: str) -> None:
    """And with a boolean mask, a count of indices or a fill by index it would read in secret."""
    goes_on = name in ("fp32", "pp2")  # these stop after one iteration
    for rank in results(inputs, name):
        reads = {where: count for where, count in rank["host_reads"].items()
                 if not any(word in where for word in AT_THE_START + AT_A_SAVE)}
        assert sum(reads.values()) == NUM_ITERATIONS - goes_on, reads
        assert all("update.py" in where for where in reads)


def test_groups_that_a_run_uses(inputs: Path) -> None:
    """Each group that HCCL uses holds buffers.  Loss and norm go through the one of all ranks, which megatron uses."""
    for name in LAYOUTS:
        expected = {"default_pg", "DATA_PARALLEL_GROUP_WITH_CP", "PIPELINE_MODEL_PARALLEL_GROUP"}
        expected |= {"TENSOR_MODEL_PARALLEL_GROUP"} if name.startswith("tp2") else set()
        expected |= {"PIPELINE_GRADIENT_GROUP"} if name.startswith("pp2") else set()
        expected |= {"CONTEXT_PARALLEL_GROUP"} if name.startswith("cp2") else set()
        for rank in results(inputs, name):
            assert {group for _, group, _ in rank["collectives"]} == expected, name


def test_events_of_the_device_time_a_step(inputs: Path) -> None:
    """In one of the runs whose host reads are counted above."""
    events = json.loads((inputs / "npu/pp2/logs/pipeline_step_2.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X" and event["dur"] > 0} > {
        "vision_forward", "language_forward", "backward", "exchange", "update"}
    for row in metrics(inputs, "npu", "pp2"):
        assert 0 < row["timers"]["backward_seconds"] < row["step_seconds"]
