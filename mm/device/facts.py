"""What a run actually ran on: device, versions and kernels, read from the objects that do the work."""

import importlib.metadata
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from mm.device.attention import torch_npu
from mm.device.device import Device
from mm.device.kernels import AddNorm, LogitKernels
from mm.device.partial_attention import PartialAttention

_PACKAGES = ("torch", "torch_npu", "megatron-core", "transformer_engine", "apex", "flash-attn")
_CANN_VERSION_FILES = "*-linux/ascend_toolkit_install.info"
"""In the directory that Ascend's set_env.sh names; has a line ``version=...`` (its installation guide)."""


def device_facts(device: Device, adam: object) -> dict[str, Any]:
    """JSON values: device, versions of what is installed, and which kernels and forms the training uses.

    ``adam`` is the optimizer inside of megatron's, None on a rank that trains nothing.
    """
    return {
        "device": device.name,
        "backend": device.backend,
        "versions": _versions(),
        "kernels": {field.name: _name(getattr(device.kernels, field.name)) for field in fields(device.kernels)},
        "adam": None if adam is None else _name(type(adam)),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "switches": _switches(device),
    }


def sdpa_backend(
    device: Device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, causal: bool
) -> str | None:
    """Which of torch's kernels SDPA takes for such heads; None where attention is not torch's.

    The order in which SDPA tries them differs between releases of torch.
    """
    if device.kind == "npu":
        return None
    if device.kind == "cuda" and dtype == torch.float32:
        num_kv_heads = num_heads  # cuda_attention repeats them
    q = torch.empty(1, num_heads, 128, head_dim, dtype=dtype, device=device.torch_device, requires_grad=True)
    k = torch.empty(1, num_kv_heads, 128, head_dim, dtype=dtype, device=device.torch_device, requires_grad=True)
    chosen = torch._fused_sdp_choice(  # pyright: ignore[reportPrivateImportUsage]  (it has no public name)
        q, k, k, None, 0.0, causal, enable_gqa=num_heads != num_kv_heads
    )
    return torch.nn.attention.SDPBackend(chosen).name


def _switches(device: Device) -> dict[str, bool]:
    """What ``Device.pick`` has turned off, read where torch and torch_npu keep it."""
    if device.kind == "cuda":
        return {"cudnn_sdp": torch.backends.cuda.cudnn_sdp_enabled()}
    return {"jit_compile": not torch_npu().npu.is_jit_compile_false()} if device.kind == "npu" else {}


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    home = os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH")
    for file in Path(home).glob(_CANN_VERSION_FILES) if home else ():
        for version in re.findall(r"^version=(.+)$", file.read_text(encoding="utf-8"), re.MULTILINE):
            found["cann"] = version
    return found


def _name(kernel: Any) -> str | bool | None:
    """``module.name`` of a function or class: of the class if it is one's method, as autograd's ``apply`` is, and of
    the forward function if there is a pair (``sums`` of ``LogitKernels``).  None, a kernel that the device does
    without, and a switch stay so."""
    if kernel is None or isinstance(kernel, bool):
        return kernel
    kernel = kernel.forward if isinstance(kernel, PartialAttention | AddNorm) else kernel
    kernel = kernel.sums if isinstance(kernel, LogitKernels) else kernel
    owner = getattr(kernel, "__self__", None)
    kernel = owner if isinstance(owner, type) else kernel
    return f"{kernel.__module__}.{kernel.__qualname__}"
