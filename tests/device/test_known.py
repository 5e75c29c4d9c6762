"""A device is known by its whole name, and what is not known has no peak."""

import re

import pytest

from mm.device.cpu import CPU
from mm.device.cuda import CUDA, refuse_old_cuda, refuse_old_torch
from mm.device.device import known_device, peak_flops, peak_notes
from mm.device.npu import NPU, refuse_old_npu
from mm.errors import UserError
from tests.files import ROOT

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
