"""NVIDIA's GPUs: torch's flash kernels, compiled kernel functions, cuBLAS with fp32 sums, and messages by NCCL."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from mm.device.attention import (
    PLAIN,
    Gradients,
    Pairs,
    PartialAttention,
    PartialOutput,
    Segments,
    by_length,
    check_cover,
    sdpa,
)
from mm.device.kernels import Fuse, Kernels, eager_kernels, fused_kernels, plain_accumulate, rms_norm
from mm.device.platform import AcceleratorRuntime, KnownDevice, Links, Platform, Variable, torch_profiler
from mm.device.pointwise import rounded_at_random
from mm.device.shims import COMMON_SHIMS
from mm.errors import UserError

MAX_MESSAGE_CTAS = 4
"""Each is generally reported to move some 20 GB/s over NVLink: 20 MB, the hidden states of 2,756 tokens of 7B, take
0.25 ms, and a stage computes for 25 ms or more.  Chosen, not measured."""
MIN_TORCH = Version("2.11.0a0")
"""The oldest torch that was tried on CUDA, in NVIDIA's containers."""
_SM80 = (8, 0)
"""Compute capability of the A100: the first with bf16 products and with the kernel behind ``varlen_attn``."""
_HALVES = (torch.float16, torch.bfloat16)
"""Dtypes of the flash kernels."""


# Attention


def cuda_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
    """A ``Kernel``: SDPA by length, or one call of torch's ``varlen_attn``, which takes float16 and bfloat16 only.

    In other dtypes keys and values are repeated for grouped queries (in float32 only SDPA's quadratic kernel takes
    fewer of them).
    """
    if q.dtype not in _HALVES:
        return by_length(q, *_repeat_heads(q, k, v), segments, functools.partial(sdpa, causal=causal))
    if segments.prefers_batches():
        return by_length(q, k, v, segments, functools.partial(sdpa, causal=causal))
    return _varlen(q, k, v, segments, causal)


def _sdpa_kv_heads(dtype: torch.dtype, num_heads: int, num_kv_heads: int) -> int:
    return num_kv_heads if dtype in _HALVES else num_heads


def _varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    check_cover(q, segments)
    options: dict[str, Any] = {"scale": q.shape[-1] ** -0.5, "window_size": (-1, 0) if causal else (-1, -1)}
    if q.shape[1] != k.shape[1]:
        if _takes_grouped_queries(varlen_attn):
            options["enable_gqa"] = True
        else:  # torch 2.11
            k, v = _repeat_heads(q, k, v)
    starts, longest = segments.cu_seqlens, segments.max_length
    out: Any = varlen_attn(q, k, v, starts, starts, longest, longest, **options)  # a pair only with return_aux
    return out


@functools.cache
def _takes_grouped_queries(varlen_attn: Callable) -> bool:
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Give each query head its own copy of the keys and values that its group shares."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def _partial_forward(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> PartialOutput:
    if q.dtype not in _HALVES:
        return PLAIN.forward(q, k, v, pairs)
    starts = pairs.queries.cu_seqlens, pairs.keys.cu_seqlens, pairs.queries.max_length, pairs.keys.max_length
    out, logarithms, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *starts, 0.0, pairs.causal, return_debug_mask=False, scale=q.shape[-1] ** -0.5)
    return out, logarithms.t()


def _partial_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: PartialOutput, pairs: Pairs
) -> Gradients:
    if q.dtype not in _HALVES:
        return PLAIN.backward(gradient, q, k, v, whole, pairs)
    starts = pairs.queries.cu_seqlens, pairs.keys.cu_seqlens, pairs.queries.max_length, pairs.keys.max_length
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout's, which is off
    return torch.ops.aten._flash_attention_backward(
        gradient.contiguous(), q, k, v, whole[0], whole[1].t().contiguous(), *starts, 0.0, pairs.causal, random,
        random, scale=q.shape[-1] ** -0.5)


# Other operators


def cuda_accumulate(buffer: Tensor, gradient: Tensor, x: Tensor, overwrites: bool = False) -> None:
    """An ``Accumulate``: cuBLAS with fp32 output (torch 2.10 or later, where the buffer may have another dtype)."""
    if not len(x):
        if overwrites:
            buffer.zero_()
        return
    if gradient.dtype == buffer.dtype:
        plain_accumulate(buffer, gradient, x, overwrites)
    elif overwrites:
        torch.mm(gradient.t(), x, out_dtype=buffer.dtype, out=buffer)
    else:
        torch.addmm(buffer, gradient.t(), x, out_dtype=buffer.dtype, out=buffer)


def _kernels(fuse: Fuse | None) -> Kernels:
    functions, rounded = eager_kernels(), rounded_at_random
    if fuse is not None:
        functions, rounded = fused_kernels(fuse), fuse(rounded_at_random)
    return Kernels(cuda_attention, PartialAttention(_partial_forward, _partial_backward), rms_norm, *functions,
                   cuda_accumulate, rounded)


# Checks of the machine, and settings before the first work on the device


def _fault() -> str | None:
    return None if torch.cuda.is_available() else (
        "torch finds no CUDA device; check nvidia-smi, and that torch is a CUDA build")


def _versions() -> dict[str, str]:
    return {"cuda": torch.version.cuda} if torch.version.cuda else {}


def _prepare(index: int) -> None:
    """Choose the device, and stop SDPA from using cuDNN's attention.

    torch prefers it on Hopper and Blackwell, but it makes a plan for each exact shape: 23 to 37 ms of the host for
    every new sample length, and plans are never freed.  Flash attention takes any length.
    """
    refuse_old_torch(torch.__version__)
    torch.cuda.set_device(index)
    refuse_old_cuda(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
    torch.backends.cuda.enable_cudnn_sdp(False)


def _switches() -> dict[str, bool]:
    return {"cudnn_sdp": torch.backends.cuda.cudnn_sdp_enabled()}


def refuse_old_torch(version: str) -> None:
    """Raise UserError for a torch that is new enough for other devices only: CUDA's attention and its products of two
    dtypes need a later one."""
    if Version(version) < MIN_TORCH:
        raise UserError(
            f"torch is {version}, but CUDA needs {MIN_TORCH.base_version} or later: older ones have no varlen_attn for "
            f"packed samples, or no product of bf16 rows with an fp32 result: "
            f"`python -m pip install 'torch>={MIN_TORCH.base_version},<2.16'`")


def refuse_old_cuda(name: str, capability: tuple[int, int]) -> None:
    """Raise UserError for a CUDA device older than the A100: it has neither bf16 nor attention over packed samples."""
    if capability < _SM80:
        major, minor = capability
        raise UserError(
            f"{name} has compute capability {major}.{minor} (sm{major}{minor}), but 8.0 or later is needed (A100, "
            f"RTX 30 and later): older devices have no bf16 products and no kernel for attention over packed samples. "
            f"Use another device, or --device cpu for a small model"
        )


# Known types


def _known(
    label: str, names: str, tflops: float, memory_mib: int | None, reference: str, memory_gb: float, links: Links
) -> KnownDevice:
    memory_bytes = None if memory_mib is None else memory_mib * 2**20
    return KnownDevice(label, names, tflops * 1e12, memory_bytes, reference, memory_gb * 1e9, links)


# Half of the published NVLink bandwidth, which counts both directions; 16 lanes of PCIe elsewhere.  DGX and HGX systems
# have one network adapter per GPU: 200 Gbit/s with A100, 400 Gbit/s with Hopper and Blackwell.
_NVLINK_3, _NVLINK_4, _NVLINK_5 = Links(300e9, 25e9), Links(450e9, 50e9), Links(900e9, 50e9)
_A800_LINKS, _H800_LINKS, _BRIDGES = Links(200e9, 25e9), Links(200e9, 50e9), Links(300e9, 50e9, node_size=2)
_NVL72 = Links(900e9, 50e9, node_size=72)
_PCIE_4, _PCIE_5 = Links(32e9, 12.5e9), Links(64e9, 25e9)


_SHEETS = "https://www.nvidia.com/en-us/data-center/"
_KNOWN_DEVICES = (
    _known("A100 40GB", r"A100-(SXM4|PCIE)-40GB", 312, 40960, f"{_SHEETS}a100/", 1555, _NVLINK_3),
    _known("A100 80GB", r"A100-SXM4-80GB|A100 80GB PCIe", 312, 81920, f"{_SHEETS}a100/", 2039, _NVLINK_3),
    _known("A800", r"A800-SXM4-80GB|A800 80GB PCIe", 312, 81920,
           "A800 data sheet: A100's arithmetic", 2039, _A800_LINKS),
    _known("H100", r"H100 80GB HBM3", 989, 81559, f"{_SHEETS}h100/, SXM", 3350, _NVLINK_4),
    _known("H100 PCIe", r"H100 PCIe", 756, 81559, "H100 PCIe data sheet", 2000, _PCIE_5),
    _known("H100 NVL", r"H100 NVL", 835, 95830, f"{_SHEETS}h100/, NVL", 3900, _BRIDGES),
    _known("H800", r"H800", 989, 81559, "H800 data sheet, SXM: H100's arithmetic in bf16", 3350, _H800_LINKS),
    _known("H800 PCIe", r"H800 PCIe", 756, 81559, "H800 data sheet, PCIe", 2000, _PCIE_5),
    _known("H20", r"H20", 148, 97871, "H20 data sheet", 4000, _NVLINK_4),
    _known("H200", r"H200", 989, 143771, f"{_SHEETS}h200/, SXM", 4800, _NVLINK_4),
    _known("H200 NVL", r"H200 NVL", 835, 143771, f"{_SHEETS}h200/, NVL", 4800, _BRIDGES),
    _known("GH200 96GB", r"GH200 (120GB|480GB)", 989, 97871, f"{_SHEETS}grace-hopper-superchip/", 4000, _NVLINK_4),
    _known("GH200 144GB", r"GH200 144G HBM3e", 989, None, f"{_SHEETS}grace-hopper-superchip/", 4900, _NVLINK_4),
    _known("B100", r"B100", 1750, None,
           "HGX B100: 28 PFLOP/s of 8 with sparsity (Blackwell architecture brief)", 8000, _NVLINK_5),
    _known("B200", r"B200", 2250, 183359, f"{_SHEETS}hgx/, B200: 36 PFLOP/s of 8 with sparsity", 8000, _NVLINK_5),
    _known("GB200", r"GB200", 2500, 189471, f"{_SHEETS}gb200-nvl72/: 360 PFLOP/s of 72 with sparsity", 8000, _NVL72),
    _known("A10", r"A10", 125, 23028, f"{_SHEETS}products/a10-gpu/", 600, _PCIE_4),
    _known("A30", r"A30", 165, 24576, f"{_SHEETS}products/a30-gpu/", 933, _PCIE_4),
    _known("A40", r"A40", 149.7, 46068, f"{_SHEETS}a40/", 696, _PCIE_4),
    _known("L4", r"L4", 121, 23034, f"{_SHEETS}l4/", 300, _PCIE_4),
    _known("L40", r"L40", 181, 46068, f"{_SHEETS}l40/", 864, _PCIE_4),
    _known("L40S", r"L40S", 362, 46068, f"{_SHEETS}l40s/", 864, _PCIE_4),
    _known("RTX A6000", r"RTX A6000", 154.8, 49140, "NVIDIA Ampere GA102 whitepaper, appendix", 768, _PCIE_4),
    _known("RTX 6000 Ada", r"RTX 6000 Ada Generation", 364.2, 49140,
           "NVIDIA Ada professional whitepaper, appendix", 960, _PCIE_4),
    _known("RTX 3090", r"GeForce RTX 3090", 71, 24576,
           "NVIDIA Ampere GA102 whitepaper: bf16 with fp32 sums", 936, _PCIE_4),
    _known("RTX 4090", r"GeForce RTX 4090", 165.2, 24564, "NVIDIA Ada whitepaper: bf16 with fp32 sums", 1008, _PCIE_4),
    _known("RTX 5090", r"GeForce RTX 5090", 209.5, 32607,
           "NVIDIA RTX Blackwell whitepaper: bf16 with fp32 sums", 1792, _PCIE_5),
)
"""Peaks as published; those with sparsity are halved, and those of a whole system divided by its number of devices.

Memory bandwidths are from the same sheets, those of the SXM form where an entry covers several forms."""


CUDA = Platform(
    name="cuda",
    backend="nccl",
    fault=_fault,
    versions=_versions,
    version_findings=lambda _: iter(()),
    device_files="/dev/nvidia[0-9]*",
    num_devices=torch.cuda.device_count,
    known_devices=_KNOWN_DEVICES,
    prepare=_prepare,
    shims=COMMON_SHIMS,
    deterministic_variables={
        "CUBLAS_WORKSPACE_CONFIG": Variable(":4096:8", (":16:8",), "torch.use_deterministic_algorithms asks for it"),
        # Ring knows every collective; Tree and the others only some
        "NCCL_ALGO": Variable("Ring", ("Tree", "CollnetDirect", "CollnetChain", "^NVLS"), "Megatron-LM asks for it"),
    },
    switches=_switches,
    compiles_kernels=True,
    kernels=_kernels,
    sdpa_kv_heads=_sdpa_kv_heads,
    adam_obeys_scale=True,
    runtime=functools.partial(AcceleratorRuntime, "cuda"),
    profiler=torch_profiler,
    # An NCCL message occupies GPU multiprocessors from its start until the other side joins, so it starts when it is
    # needed.
    starts_messages_ahead=False,
    # Messages of a frozen prefix of stages wait for the next stage even if receives are not posted early.  By default
    # (``max_ctas``) NCCL would occupy up to 32 of the 132 multiprocessors of an H100.
    max_message_ctas=MAX_MESSAGE_CTAS,
)
