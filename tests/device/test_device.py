"""How the device is found and known, and what is read off it; what is patched is exactly the declared table."""

import importlib
import importlib.metadata
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from mm.device.cpu import CPU, CPU_SHIMS
from mm.device.cuda import CUDA, refuse_old_cuda, refuse_old_torch
from mm.device.device import (
    PLATFORMS,
    Device,
    device_facts,
    known_device,
    peak_flops,
    peak_notes,
    sdpa_backend,
    usable_platform,
)
from mm.device.npu import NPU, refuse_old_npu
from mm.device.shims import COMMON_SHIMS
from mm.errors import UserError
from tests.devices import kernels_of, platform_of
from tests.files import ROOT


def test_every_shim_target_exists_and_has_a_reason() -> None:
    Device.pick("cpu")  # importing megatron needs it
    for shim in CPU_SHIMS:
        module_name, attribute = shim.target.split(":")
        owner: object = importlib.import_module(module_name)
        for name in attribute.split("."):
            owner = getattr(owner, name)
        assert owner is shim.replacement, f"{shim.target} is not patched"
        assert len(shim.reason) > 10
    for platform in PLATFORMS:
        targets = [shim.target for shim in platform.shims]
        assert len(set(targets)) == len(targets)


def test_tensors_keep_their_meaning_under_the_shims() -> None:
    Device.pick("cpu")
    x = torch.ones(2)
    assert x.cuda() is x
    assert x.type() == "torch.cuda.FloatTensor" and x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert x.type(torch.float64).dtype == torch.float64
    assert torch.arange(2).type() == "torch.LongTensor"


@pytest.mark.parametrize(("kind", "starts_ahead", "max_ctas"), [
    ("cpu", True, None), ("npu", True, None), ("cuda", False, 4)])
def test_how_a_kind_of_device_exchanges_messages(kind: str, starts_ahead: bool, max_ctas: int | None) -> None:
    """Where a message that waits would take processors from the computation, it is asked for late, and takes few."""
    device = Device(platform_of(kind), 0, kernels_of("cpu"))
    assert (device.platform.starts_messages_ahead, device.platform.max_message_ctas) == (starts_ahead, max_ctas)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="torch finds no CUDA device"):
        Device.pick("cuda")
    with pytest.raises(UserError, match="expected auto, npu, cuda or cpu"):
        Device.pick("tpu")


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="needs a machine without torch_npu")
def test_npu_without_torch_npu_is_refused() -> None:
    with pytest.raises(UserError, match="torch_npu is not installed"):
        Device.pick("npu")


def test_a_torch_npu_that_cannot_be_imported_is_refused_and_passed_over(tmp_path: Path, monkeypatch) -> None:
    """As without CANN's environment, where not even torch loads it (TORCH_DEVICE_BACKEND_AUTOLOAD=0)."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"--device npu: torch_npu cannot be imported \(ImportError: libhccl.so: "):
        Device.pick("npu")
    assert usable_platform("auto").name != "npu"


NPU_TABLE = """
import importlib
from tests.stand_ins import fake_npu
fake_npu.start()
from mm.device.device import Device
from mm.device.npu import NPU_SHIMS
device = Device.pick("npu")
import torch
for shim in NPU_SHIMS:
    module_name, attribute = shim.target.split(":")
    owner = importlib.import_module(module_name)
    for name in attribute.split("."):
        owner = getattr(owner, name)
    assert owner is shim.replacement and len(shim.reason) > 10, shim.target
x = torch.ones(2, device=device.torch_device)
from mm.device.device import device_facts
assert torch.npu.is_jit_compile_false() and device_facts(device, None)["switches"] == {"jit_compile": False}
torch.npu.get_device_name = lambda device=None: "Ascend310P3"
try:
    Device.pick("npu")
except Exception as error:
    assert str(error).startswith("Ascend310P3 has no bf16"), error
else:
    raise AssertionError("a device for inference was taken")
print(x.device, x.type(), x.bfloat16().type(), x.cpu().type(), x.type(torch.float64).dtype)
"""


def test_the_shims_of_an_npu_and_an_apex_without_kernels(tmp_path: Path) -> None:
    """Ascend's apex can be imported, and raises when its Adam is made: megatron never chooses it."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    (tmp_path / "apex" / "optimizers.py").write_text("class FusedAdam: ...\nclass FusedSGD: ...\n")
    program = NPU_TABLE + "import megatron.core.optimizer as o; print(o.Adam is torch.optim.AdamW, o.SGD.__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})  # fmt: skip
    assert done.stdout.split() == [
        "npu:0", "torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", "torch.FloatTensor", "torch.float64",
        "True", "apex.optimizers",
    ], done.stderr  # fmt: skip


def test_every_device_gets_torchs_adam_and_safe_gloo() -> None:
    for platform in PLATFORMS:
        assert set(COMMON_SHIMS) <= set(platform.shims)


def test_mindspeeds_adaptor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mindspeed.megatron_adaptor", ModuleType("mindspeed.megatron_adaptor"))
    with pytest.raises(UserError, match=r"mindspeed\.megatron_adaptor is loaded.*Remove its import from the script"):
        Device.pick("cpu")


def test_the_npu_operators_are_called_as_torch_npu_wants_them(torch_npu: object) -> None:
    npu, cpu = kernels_of("npu"), kernels_of("cpu")
    x, weight = torch.randn(5, 8), torch.randn(8)
    torch.testing.assert_close(npu.rms_norm(x, weight, 1e-6), cpu.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(npu.swiglu(x), cpu.swiglu(x))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """What ``Device.pick`` asks of torch about a CUDA device, and of what age it says to be.  It computes nothing."""
    asked: dict[str, object] = {"name": "NVIDIA H100 80GB HBM3", "capability": (9, 0), "set": None, "fault": None}
    monkeypatch.setattr("mm.device.device.compile_fault", lambda device: asked["fault"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: asked.update(set=index))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: asked["name"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: asked["capability"])
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield asked
    torch.backends.cuda.enable_cudnn_sdp(True)


def test_cudnns_attention_is_off_on_cuda(cuda: dict[str, object]) -> None:
    device = Device.pick("cuda")
    assert cuda["set"] == 0 and not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert device_facts(device, None)["switches"] == {"cudnn_sdp": False}


def test_an_old_cuda_device_is_refused_by_name(cuda: dict[str, object]) -> None:
    cuda |= {"name": "Tesla T4", "capability": (7, 5)}
    with pytest.raises(UserError, match=r"Tesla T4 has compute capability 7\.5"):
        Device.pick("cuda")


def test_kernel_functions_run_eagerly_with_a_note_where_they_cannot_be_compiled(cuda: dict[str, object]) -> None:
    cuda["fault"] = "InvalidCxxCompiler: no gcc"
    device = Device.pick("cuda")
    (note,) = device.notes
    assert "does not work here: InvalidCxxCompiler: no gcc." in note and "install gcc and python3-dev" in note
    kernels = device_facts(device, None)["kernels"]
    assert kernels["swiglu"] == "mm.device.pointwise.swiglu" and kernels["rope"] == "mm.device.pointwise.rope"
    x = torch.randn(3, 8)
    assert torch.equal(device.kernels.swiglu(x), kernels_of("cpu").swiglu(x))


def test_random_states_go_on_where_they_were() -> None:
    device = Device.pick("cpu")
    states = device.random_states()
    expected = random.random(), np.random.rand(), torch.rand(2)
    assert random.random() != expected[0]
    device.set_random_states(states)
    assert (random.random(), np.random.rand()) == expected[:2] and torch.equal(torch.rand(2), expected[2])


NAMES = {  # as drivers report them
    "NVIDIA A100-SXM4-80GB": "A100 80GB", "NVIDIA A100 80GB PCIe": "A100 80GB", "NVIDIA A100-PCIE-40GB": "A100 40GB",
    "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200", "NVIDIA GH200 480GB": "GH200 96GB", "NVIDIA GH200 120GB": "GH200 96GB",
    "NVIDIA GH200 144G HBM3e": "GH200 144GB", "NVIDIA H20": "H20", "NVIDIA B200": "B200", "NVIDIA GB200": "GB200",
    "NVIDIA L4": "L4", "NVIDIA L40": "L40", "NVIDIA L40S": "L40S", "NVIDIA GeForce RTX 4090": "RTX 4090",
    "Ascend910B1": "Ascend910B1", "Ascend910B4": "Ascend910B4", "Ascend910B4-1": "Ascend910B4-1",
    "Ascend910_9391": "Ascend910_9391", "Ascend910_9362": "other Ascend910_93",
}  # fmt: skip
UNKNOWN = ("cpu", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A100-SXM-64GB", "NVIDIA H100 64GB HBM2", "NVIDIA GB300",
           "NVIDIA GeForce RTX 4090 Laptop GPU", "Ascend910_9599", "Ascend910B", "AMD Instinct MI300X")


@pytest.mark.parametrize("name", NAMES)
def test_a_device_is_known_by_its_drivers_name(name: str) -> None:
    found = known_device(name)
    assert found is not None and found.label == NAMES[name] and peak_flops(name) == found.peak_flops


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_has_no_peak(name: str) -> None:
    assert known_device(name) is None and peak_flops(name) is None


def test_a_training_without_a_known_peak_says_that_mfu_is_left_out() -> None:
    assert peak_notes(NPU, "Ascend910_9362") == (
        "no published peak FLOP/s is known for Ascend910_9362, so MFU is not reported",)
    assert peak_notes(CUDA, "NVIDIA B200") == peak_notes(CPU, "cpu") == ()


def test_a_peak_of_an_npu_is_that_of_its_cube_cores() -> None:
    """8,192 FLOP a core and cycle: two for each place of a 16 x 16 x 16 product."""
    cores = {"Ascend910B1": (24, 1.85), "Ascend910B2": (24, 1.8), "Ascend910B3": (20, 1.8), "Ascend910B4": (20, 1.5)}
    for name, (num_cores, ghz) in cores.items():
        assert peak_flops(name) == pytest.approx(num_cores * 2 * 16**3 * ghz * 1e9, rel=2e-4)


def test_devices_without_bf16_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"Tesla T4 has compute capability 7\.5 \(sm75\), but 8\.0 or later is needed"):
        refuse_old_cuda("Tesla T4", (7, 5))
    refuse_old_cuda("NVIDIA A100-SXM4-80GB", (8, 0))
    refuse_old_cuda("NVIDIA B200", (10, 0))
    for name in ("Ascend310P3", "Ascend910A", "Ascend910ProB", "Ascend910B"):
        with pytest.raises(UserError, match=rf"{name} has no bf16.*Atlas A2 or A3 is needed"):
            refuse_old_npu(name)
    for name in ("Ascend910B1", "Ascend910B4-1", "Ascend910B2C", "Ascend910_9391", "Ascend950PR_950z"):
        refuse_old_npu(name)


def test_cuda_needs_a_later_torch_than_other_devices() -> None:
    with pytest.raises(UserError, match=r"2\.7\.1\+cu126, but CUDA needs 2\.11\.0 or later") as caught:
        refuse_old_torch("2.7.1+cu126")
    (cap,) = re.findall(r'"torch>=[^"]+,(<[\d.]+)"', (ROOT / "setup.py").read_text())
    assert f"pip install 'torch>=2.11.0,{cap}'" in str(caught.value)
    for version in ("2.11.0a0+eb65b36914.nv26.2", "2.11.0", "2.13.0+cu130"):
        refuse_old_torch(version)


def test_kernels_and_adam_are_named_as_they_are(torch_npu: object) -> None:
    cpu = Device.pick("cpu")
    facts = device_facts(cpu, torch.optim.AdamW([torch.zeros(1, requires_grad=True)]))
    assert facts["kernels"] | {"rms_norm": "mm.device.kernels.rms_norm", "swiglu": "mm.device.pointwise.swiglu",
                               "attention": "mm.device.cpu.cpu_attention",
                               "logits": "mm.device.pointwise.logit_sums"} == facts["kernels"]
    assert (facts["device"], facts["adam"], facts["deterministic"]) == ("cpu", "torch.optim.adamw.AdamW", False)
    npu = device_facts(Device(CPU, 0, kernels_of("npu")), None)
    assert npu["kernels"]["attention"] == "mm.device.npu.npu_attention" and npu["adam"] is None
    assert npu["kernels"]["add_norm"] is None  # it has none
    assert npu["kernels"]["logits"] == facts["kernels"]["logits"] == "mm.device.pointwise.logit_sums"
    cuda = device_facts(Device(CPU, 0, kernels_of("cuda")), None)["kernels"]
    assert cuda["logits"] == "mm.device.kernels.compiled.logit_sums_fusable" and all(cuda.values())


def test_versions_are_of_what_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    versions = device_facts(Device.pick("cpu"), None)["versions"]
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]  # its builds name CUDA in one
    assert versions["megatron-core"] == importlib.metadata.version("megatron-core")
    assert "cann" not in versions
    file = tmp_path / "aarch64-linux" / "ascend_toolkit_install.info"
    file.parent.mkdir()
    file.write_text("package_name=Ascend-cann-toolkit\nversion=8.2.RC1\narch=aarch64\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    (tmp_path / "x86_64-linux" / "ascend_toolkit_install.info").mkdir(parents=True)  # one that cannot be read
    assert device_facts(Device.pick("cpu"), None)["versions"]["cann"] == "8.2.RC1"


def test_sdpas_backend_is_what_torch_would_take() -> None:
    cpu = Device.pick("cpu")
    assert sdpa_backend(cpu, torch.float32, 4, 2, 64, causal=True) == "FLASH_ATTENTION"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert sdpa_backend(cpu, torch.float32, 4, 2, 64, causal=True) == "MATH"
    assert sdpa_backend(Device(NPU, 0, kernels_of("npu")), torch.float32, 4, 2, 64, causal=True) is None
