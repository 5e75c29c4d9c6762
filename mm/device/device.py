"""The device of this process: how it is chosen among all platforms, its random numbers, and what a run ran on.

``Device.pick`` must run before megatron is imported: some of its modules query the device at import.
"""

import random
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mm.device.attention import PartialAttention
from mm.device.cpu import CPU
from mm.device.cuda import CUDA
from mm.device.kernels import AddNormKernels, Kernels, LogitKernels, compile_fault, compiled
from mm.device.npu import NPU
from mm.device.platform import KnownDevice, Platform, Runtime, make_deterministic
from mm.device.shims import apply_shims
from mm.environment import DECISIVE, Launched, installed
from mm.errors import UserError

PLATFORMS: tuple[Platform, ...] = (NPU, CUDA, CPU)
"""In the order in which ``--device auto`` prefers them.  The last one works everywhere."""
KNOWN_DEVICES = tuple(device for platform in PLATFORMS for device in platform.known_devices)


def absent_device(wanted: str) -> Iterator[str]:
    """Why ``--check`` finds that a run could not start here with ``--device`` ``wanted``."""
    try:
        usable_platform(wanted)
    except UserError as error:
        yield f"{error}; --device auto with --check checks the files alone, on any machine"


def usable_platform(wanted: str) -> Platform:
    """The platform of this name, or for "auto" the first that can be used here.

    Raises UserError if there is none of this name, or it cannot be used here.
    """
    if wanted == "auto":
        return next(platform for platform in PLATFORMS if platform.fault() is None)
    for platform in PLATFORMS:
        if platform.name == wanted:
            if (fault := platform.fault()) is not None:
                raise UserError(f"--device {wanted}: {fault}")
            return platform
    *names, last = ("auto", *(platform.name for platform in PLATFORMS))
    raise UserError(f"--device is {wanted!r}; expected {', '.join(names)} or {last}")


def known_device(name: str) -> KnownDevice | None:
    """The type of the device whose driver reports ``name``, which must match as a whole; None if it is not known."""
    short = name.removeprefix("NVIDIA ")
    return next((one for one in KNOWN_DEVICES if re.fullmatch(one.names, short)), None)


def peak_flops(name: str) -> float | None:
    """Published peak bf16 FLOP/s of the device whose driver reports ``name``; None if unknown, as MFU is then."""
    found = known_device(name)
    return None if found is None else found.peak_flops


def peak_notes(platform: Platform, name: str) -> tuple[str, ...]:
    """A note if the device's peak is unknown, so MFU is not reported; none for a platform without published peaks."""
    if not platform.known_devices or peak_flops(name) is not None:
        return ()
    return (f"no published peak FLOP/s is known for {name}, so MFU is not reported",)


_ADAPTOR = "mindspeed.megatron_adaptor"
_EAGER_NOTE = (
    "SwiGLU, rope, norms and the loss's logits run eagerly, as several kernels each, because torch.compile does not "
    "work here: {}. It needs a C compiler, Python's headers (Python.h) and Triton: install gcc and python3-dev, then "
    "start again"
)


@dataclass(frozen=True)
class Device:
    """One accelerator (or the CPU), as this process uses it."""

    platform: Platform
    index: int
    """Index among the node's devices; the CPU ignores it."""
    kernels: Kernels
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """Notes for the user about the device: one sentence each, for the start of the log."""

    @classmethod
    def pick(cls, wanted: str = "auto", deterministic: bool = False) -> "Device":
        """Choose npu, cuda or cpu (in this order if ``wanted`` is "auto") and prepare torch and megatron for it.

        Raises ``UserError`` if the wanted device cannot be used here or is too old, if environment variables contradict
        ``deterministic``, or if MindSpeed has patched megatron.
        """
        if _ADAPTOR in sys.modules:
            raise UserError(
                f"{_ADAPTOR} is loaded in this process: it parses this program's command line as its own, and "
                f"replaces Tensor.view and megatron's gradient buffers and optimizer, so the tested code would not "
                f"run. Remove its import from the script; MindSpeed may stay installed, but is not needed"
            )
        platform = usable_platform(wanted)
        if deterministic:
            make_deterministic(platform.deterministic_variables)
        index, num_devices = Launched.here().local_rank, platform.num_devices()
        if num_devices and index >= num_devices:
            raise UserError(f"this rank is number {index} on its machine (LOCAL_RANK), which has {num_devices} "
                            f"{platform.name} devices; start at most {num_devices} ranks on it")
        platform.prepare(index)
        apply_shims(platform.shims)
        if not platform.compiles_kernels:
            return cls(platform, index, platform.kernels(None))
        fault = compile_fault(platform.runtime(index).torch_device)
        if fault is not None:
            return cls(platform, index, platform.kernels(None), notes=(_EAGER_NOTE.format(fault),))
        return cls(platform, index, platform.kernels(compiled))

    @cached_property
    def runtime(self) -> Runtime:
        return self.platform.runtime(self.index)

    @property
    def torch_device(self) -> torch.device:
        return self.runtime.torch_device

    @property
    def name(self) -> str:
        return self.runtime.name

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 FLOP/s published by its maker; None if unknown."""
        return peak_flops(self.name)

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to this device; the host does not wait for the work queued there."""
        return self.runtime.copy(tensor)

    def seed(self, seed: int) -> None:
        """Seed Python, numpy and torch, so that equal runs save equal files; training draws nothing from them."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def random_states(self) -> dict[str, Tensor]:
        _, words, _ = random.getstate()
        numpy_state: Any = np.random.get_state(legacy=False)  # typed as if it could be the old tuple
        key, position = numpy_state["state"]["key"].tolist(), numpy_state["state"]["pos"]
        states = {
            "python": torch.tensor(words, dtype=torch.int64),
            "numpy": torch.tensor([*key, position], dtype=torch.int64),
            "torch": torch.get_rng_state(),
        }
        own = self.runtime.random_state()
        return states if own is None else {**states, "device": own}

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        version, _, _ = random.getstate()
        random.setstate((version, tuple(states["python"].tolist()), None))
        *keys, position = states["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
        torch.set_rng_state(states["torch"])
        if "device" in states:
            self.runtime.set_random_state(states["device"])


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
    """The kernel that this torch's SDPA chooses for such heads; None if attention does not use SDPA."""
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
    kernel = kernel.forward if isinstance(kernel, PartialAttention | AddNormKernels) else kernel
    kernel = kernel.sums if isinstance(kernel, LogitKernels) else kernel
    owner = getattr(kernel, "__self__", None)
    kernel = owner if isinstance(owner, type) else kernel
    return f"{kernel.__module__}.{kernel.__qualname__}"
