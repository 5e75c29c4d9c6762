"""What a run actually ran on: device, versions and kernels, read from the objects that do the work."""

from dataclasses import fields
from typing import Any

import torch

from mm.device.device import Device
from mm.device.kernels import AddNormLeaves, LogitKernels
from mm.device.partial_attention import PartialAttention
from mm.device.platforms import PLATFORMS
from mm.environment import DECISIVE, installed

_PACKAGES = (*DECISIVE, "transformer_engine", "apex", "flash-attn")
"""Packages besides those that a platform reports."""


def device_facts(device: Device, adam: object) -> dict[str, Any]:
    """Device, versions of installed packages, and the kernels and optimizer that the training uses, as JSON values.

    ``adam`` is the torch optimizer inside megatron's; None on a rank that trains nothing.
    """
    return {
        "device": device.name,
        "backend": device.platform.backend,
        "versions": installed_versions(),
        "kernels": {field.name: kernel_name(getattr(device.kernels, field.name)) for field in fields(device.kernels)},
        "adam": None if adam is None else kernel_name(type(adam)),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "switches": device.platform.switches(),
    }


def sdpa_backend(
    device: Device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, causal: bool
) -> str | None:
    """The kernel that torch's SDPA chooses for such heads; None if attention does not use SDPA.

    Releases of torch differ in the order in which SDPA tries its kernels.
    """
    given = device.platform.sdpa_kv_heads(dtype, num_heads, num_kv_heads)
    if given is None:
        return None
    q = torch.empty(1, num_heads, 128, head_dim, dtype=dtype, device=device.torch_device, requires_grad=True)
    k = torch.empty(1, given, 128, head_dim, dtype=dtype, device=device.torch_device, requires_grad=True)
    chosen = torch._fused_sdp_choice(  # pyright: ignore[reportPrivateImportUsage]  (it has no public name)
        q, k, k, None, 0.0, causal, enable_gqa=num_heads != given
    )
    return torch.nn.attention.SDPBackend(chosen).name


def installed_versions() -> dict[str, str]:
    """Versions of the packages that decide what is computed, and of the devices' libraries."""
    found = {package: version for package in _PACKAGES if (version := installed(package)) is not None}
    for platform in PLATFORMS:
        found |= platform.versions()
    return found


def kernel_name(kernel: Any) -> str | bool | None:
    """``module.name`` of a kernel: of the class for a class method such as autograd's ``apply``, and of the forward
    function (``sums`` of ``LogitKernels``) for a pair.  None and booleans are returned as they are."""
    if kernel is None or isinstance(kernel, bool):
        return kernel
    kernel = kernel.forward if isinstance(kernel, PartialAttention | AddNormLeaves) else kernel
    kernel = kernel.sums if isinstance(kernel, LogitKernels) else kernel
    owner = getattr(kernel, "__self__", None)
    kernel = owner if isinstance(owner, type) else kernel
    return f"{kernel.__module__}.{kernel.__qualname__}"
