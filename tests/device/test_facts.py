"""What a run's file says of device, versions and kernels is read off the objects."""

import importlib.metadata
from pathlib import Path

import pytest
import torch

from mm.device.cpu import CPU
from mm.device.device import Device, device_facts, sdpa_backend
from mm.device.npu import NPU
from tests.devices import kernels_of


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
