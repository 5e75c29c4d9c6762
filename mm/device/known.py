"""Devices that are known by the name that their driver reports: peak arithmetic and memory, each with its source.

A name is compared as a whole, so that a slice of a device (MIG) or a later type is never taken for one of these.  What
is not here has no peak, and MFU is left out.
"""

import re
from dataclasses import dataclass

from mm.errors import UserError

_MIB = 2**20
_GIB = 2**30
_SM80 = (8, 0)
"""Compute capability of A100: the first with bf16 products and with the kernel behind ``varlen_attn``."""
_SHEETS = "https://www.nvidia.com/en-us/data-center/"
_CANN = "CANN's platform_config: cube cores x 8,192 FLOP x cube frequency"
_MSMODELING = "Huawei's msmodeling, device profile"


@dataclass(frozen=True)
class KnownDevice:
    """One type of accelerator."""

    label: str
    """What reports call it."""
    names: str
    """A regular expression of the whole name, without the maker's "NVIDIA "."""
    peak_flops: float | None
    """Dense bf16 FLOP/s with sums in fp32.  None: no published number was found."""
    memory_bytes: int | None
    """The whole memory: of NVIDIA's as nvidia-smi shows it, of others as the maker names it.  None: not found."""
    source: str
    """Where the peak is published."""


def _cuda(label: str, names: str, tflops: float, memory_mib: int | None, source: str) -> KnownDevice:
    return KnownDevice(label, names, tflops * 1e12, None if memory_mib is None else memory_mib * _MIB, source)


def _ascend(label: str, names: str, tflops: float | None, memory_gib: int, source: str) -> KnownDevice:
    return KnownDevice(label, names, None if tflops is None else tflops * 1e12, memory_gib * _GIB, source)


KNOWN_DEVICES = (
    # A number with sparsity is halved, and one for a whole system divided by its devices.
    _cuda("A100 40GB", r"A100-(SXM4|PCIE)-40GB", 312, 40960, f"{_SHEETS}a100/"),
    _cuda("A100 80GB", r"A100-SXM4-80GB|A100 80GB PCIe", 312, 81920, f"{_SHEETS}a100/"),
    _cuda("A800", r"A800-SXM4-80GB|A800 80GB PCIe", 312, 81920, "A800 data sheet: A100's arithmetic"),
    _cuda("H100", r"H100 80GB HBM3", 989, 81559, f"{_SHEETS}h100/, SXM"),
    _cuda("H100 PCIe", r"H100 PCIe", 756, 81559, "H100 PCIe data sheet"),
    _cuda("H100 NVL", r"H100 NVL", 835, 95830, f"{_SHEETS}h100/, NVL"),
    _cuda("H800", r"H800", 989, 81559, "H800 data sheet, SXM: H100's arithmetic in bf16"),
    _cuda("H800 PCIe", r"H800 PCIe", 756, 81559, "H800 data sheet, PCIe"),
    _cuda("H20", r"H20", 148, 97871, "H20 data sheet"),
    _cuda("H200", r"H200", 989, 143771, f"{_SHEETS}h200/, SXM"),
    _cuda("H200 NVL", r"H200 NVL", 835, 143771, f"{_SHEETS}h200/, NVL"),
    _cuda("GH200 96GB", r"GH200 (120GB|480GB)", 989, 97871, f"{_SHEETS}grace-hopper-superchip/"),
    _cuda("GH200 144GB", r"GH200 144G HBM3e", 989, None, f"{_SHEETS}grace-hopper-superchip/"),
    _cuda("B100", r"B100", 1750, None, "HGX B100: 28 PFLOP/s of 8 with sparsity (Blackwell architecture brief)"),
    _cuda("B200", r"B200", 2250, 183359, f"{_SHEETS}hgx/, B200: 36 PFLOP/s of 8 with sparsity"),
    _cuda("GB200", r"GB200", 2500, 189471, f"{_SHEETS}gb200-nvl72/: 360 PFLOP/s of 72 with sparsity"),
    _cuda("A10", r"A10", 125, 23028, f"{_SHEETS}products/a10-gpu/"),
    _cuda("A30", r"A30", 165, 24576, f"{_SHEETS}products/a30-gpu/"),
    _cuda("A40", r"A40", 149.7, 46068, f"{_SHEETS}a40/"),
    _cuda("L4", r"L4", 121, 23034, f"{_SHEETS}l4/"),
    _cuda("L40", r"L40", 181, 46068, f"{_SHEETS}l40/"),
    _cuda("L40S", r"L40S", 362, 46068, f"{_SHEETS}l40s/"),
    _cuda("RTX A6000", r"RTX A6000", 154.8, 49140, "NVIDIA Ampere GA102 whitepaper, appendix"),
    _cuda("RTX 6000 Ada", r"RTX 6000 Ada Generation", 364.2, 49140, "NVIDIA Ada professional whitepaper, appendix"),
    _cuda("RTX 3090", r"GeForce RTX 3090", 71, 24576, "NVIDIA Ampere GA102 whitepaper: bf16 with fp32 sums"),
    _cuda("RTX 4090", r"GeForce RTX 4090", 165.2, 24564, "NVIDIA Ada whitepaper: bf16 with fp32 sums"),
    _cuda("RTX 5090", r"GeForce RTX 5090", 209.5, 32607, "NVIDIA RTX Blackwell whitepaper: bf16 with fp32 sums"),
    # Huawei's data sheets give fp16, which is 6 to 14 % more: 376, 313 and 280 TFLOP/s of A2, 752 of both dies of A3.
    # A die of 910C (A3) is a device of its own; its memory is half of the chip's 128 GB.
    _ascend("Ascend910B1", r"Ascend910B1", 363.7, 64, f"{_CANN} (24, 1.85 GHz)"),
    _ascend("Ascend910B2", r"Ascend910B2", 353.9, 64, f"{_MSMODELING} ATLAS_800_A2_376T_64G (24, 1.8 GHz)"),
    _ascend("Ascend910B3", r"Ascend910B3", 294.9, 64, f"{_MSMODELING} ATLAS_800_A2_313T_64G (20, 1.8 GHz)"),
    _ascend("Ascend910B4", r"Ascend910B4", 245.8, 32, f"{_MSMODELING} ATLAS_800_A2_280T_32G (20, 1.5 GHz)"),
    _ascend("Ascend910B4-1", r"Ascend910B4-1", 245.8, 64, f"{_MSMODELING} ATLAS_800_A2_280T_64G (20, 1.5 GHz)"),
    _ascend("Ascend910_9391", r"Ascend910_9391", 363.7, 64, f"{_CANN} (24, 1.85 GHz)"),
    _ascend("other Ascend910_93", r"Ascend910_93(62|72|81|82|92)", None, 64, "not found for each of these types"),
)
"""Each number as published; peaks of Ascend are those of the cube cores in bf16."""

_WITHOUT_BF16 = re.compile(r"Ascend310.*|Ascend910(A|B|ProA|ProB|PremiumA)?")
"""Ascend's devices for inference, and the first 910 (torch_npu's list of SoC versions): "Ascend910B" alone is one of
those, "Ascend910B1" to "Ascend910B4" are A2."""


def known_device(name: str) -> KnownDevice | None:
    """The type of a device by the ``name`` that its driver reports; None for one that is not known."""
    short = name.removeprefix("NVIDIA ")
    return next((one for one in KNOWN_DEVICES if re.fullmatch(one.names, short)), None)


def peak_flops(name: str) -> float | None:
    """Peak bf16 FLOP/s of a device by the ``name`` that its driver reports; None where no published number is known."""
    found = known_device(name)
    return None if found is None else found.peak_flops


def peak_notes(name: str) -> tuple[str, ...]:
    """Note that the device's peak is unknown, so there is no MFU; nothing for the CPU."""
    if name == "cpu" or peak_flops(name) is not None:
        return ()
    return (f"no published peak is known of {name}, so MFU is left out",)


def refuse_old_cuda(name: str, capability: tuple[int, int]) -> None:
    """Raise UserError for a CUDA device older than A100: it has neither bf16 nor attention over packed samples."""
    if capability < _SM80:
        major, minor = capability
        raise UserError(
            f"{name} has compute capability {major}.{minor} (sm{major}{minor}), and 8.0 is needed (A100, RTX 30 and "
            f"later): older devices have no bf16 products and no kernel for attention over packed samples. Use another "
            f"device, or --device cpu for a small model"
        )


def refuse_old_npu(name: str) -> None:
    """Raise UserError for an NPU without bf16, on which the operators of A2 and A3 do not run."""
    if _WITHOUT_BF16.fullmatch(name):
        raise UserError(
            f"{name} has no bf16, and npu_fusion_attention does not run on it; an Atlas A2 or A3 is needed, which "
            f"torch_npu calls Ascend910B1 to Ascend910B4 and Ascend910_93xx. Use another device, or --device cpu for a "
            f"small model"
        )
