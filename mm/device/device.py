"""The device of this process: how it is chosen, copies to and from it, its memory, peak and random numbers.

``Device.pick`` must run before megatron is imported: some of its modules query the device at import.
"""

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mm.device.compiled import compile_fault, compiled
from mm.device.deterministic import make_deterministic
from mm.device.kernels import Kernels
from mm.device.platform import Platform, Runtime
from mm.device.platforms import peak_flops, usable_platform
from mm.device.shims import apply_shims
from mm.environment import Launched
from mm.errors import UserError

_ADAPTOR = "mindspeed.megatron_adaptor"
_EAGER_NOTE = (
    "SwiGLU, rope, norms and the loss's logits run eagerly, as several kernels each, because torch.compile does not "
    "work here: {}. It needs a C compiler, Python's headers (Python.h) and Triton: install gcc and python3-dev, then "
    "start again"
)


@dataclass(frozen=True)
class Device:
    """One accelerator (or the CPU), as this process uses it.

    Everything that depends on the kind of device comes from its ``platform``.
    """

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
        if not platform.compiles_leaves:
            return cls(platform, index, platform.kernels(None))
        fault = compile_fault(platform.runtime(index).torch_device)
        if fault is not None:
            return cls(platform, index, platform.kernels(None), notes=(_EAGER_NOTE.format(fault),))
        return cls(platform, index, platform.kernels(compiled))

    @cached_property
    def runtime(self) -> Runtime:
        """Its streams, copies, times and memory."""
        return self.platform.runtime(self.index)

    @property
    def torch_device(self) -> torch.device:
        return self.runtime.torch_device

    @property
    def name(self) -> str:
        """The device's own name, as its driver reports it."""
        return self.runtime.name

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 FLOP/s published by its maker; None if unknown."""
        return peak_flops(self.name)

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to this device; the host does not wait for the work queued there."""
        return self.runtime.copy(tensor)

    def seed(self, seed: int) -> None:
        """Seed all random number generators of this process: Python, numpy, torch and torch on the device.

        Training draws nothing from them; they are seeded so that equal runs save equal files.
        """
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def random_states(self) -> dict[str, Tensor]:
        """The states of the generators that ``seed`` seeds."""
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
        """Restore the states that ``random_states`` returned."""
        version, _, _ = random.getstate()
        random.setstate((version, tuple(states["python"].tolist()), None))
        *keys, position = states["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
        torch.set_rng_state(states["torch"])
        if "device" in states:
            self.runtime.set_random_state(states["device"])
