"""The device of this process: how it is chosen, copies to and from it, its memory, peak and random numbers.

``Device.pick`` must run before megatron is imported: some of its modules query the device at import.
"""

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mm.device.compiled import compile_fault, compiled
from mm.device.deterministic import make_deterministic
from mm.device.kernels import Kernels
from mm.device.known import peak_flops
from mm.device.platform import Platform, Runtime
from mm.device.platforms import usable_platform
from mm.device.shims import apply_shims
from mm.device.side import SideQueue
from mm.errors import UserError
from mm.launched import Launched

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
    def _runtime(self) -> Runtime:
        return self.platform.runtime(self.index)

    @property
    def kind(self) -> str:
        """The platform's name."""
        return self.platform.name

    @property
    def backend(self) -> str:
        """torch.distributed backend for tensors on this device."""
        return self.platform.backend

    @property
    def torch_device(self) -> torch.device:
        return self._runtime.torch_device

    @property
    def name(self) -> str:
        """The device's own name, as its driver reports it."""
        return self._runtime.name

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 FLOP/s published by its maker; None if unknown."""
        return peak_flops(self.name)

    @property
    def adam_obeys_scale(self) -> bool:
        """As in ``Platform``."""
        return self.platform.adam_obeys_scale

    @property
    def starts_messages_ahead(self) -> bool:
        """As in ``Platform``."""
        return self.platform.starts_messages_ahead

    @property
    def max_message_ctas(self) -> int | None:
        """As in ``Platform``."""
        return self.platform.max_message_ctas

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to this device; the host does not wait for the work queued there."""
        return self._runtime.copy(tensor)

    def pin(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to pinned memory, in any thread; on the CPU the result is the tensor itself."""
        return self._runtime.pin(tensor)

    def side_queue(self) -> SideQueue:
        """A new side stream of this device."""
        return self._runtime.side_queue()

    def start_reading(self, tensor: Tensor) -> Callable[[], list[float]]:
        """Start copying a small fp32 vector to the host; calling the result waits for it and returns its numbers.

        The wait is for work queued before this call, not for work queued between the two calls.
        """
        on_host = self.start_copying_back(tensor)
        return lambda: on_host().tolist()

    def host_buffer(self, num_bytes: int) -> Tensor | None:
        """Pinned memory for ``start_copying_back``, as bytes; None on the CPU, whose tensors are on the host."""
        return self._runtime.host_buffer(num_bytes)

    def start_copying_back(self, tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Start copying a tensor to the host; calling the result, in any thread, waits for the copy and returns it.

        ``into``: memory for the copy, pinned on an accelerator; None allocates it, but on the CPU the result is then
        the tensor itself.
        """
        return self._runtime.start_copying_back(tensor, into)

    def mark(self) -> Any:
        """Mark this moment; on an accelerator, the moment when all work queued on the current stream so far is done."""
        return self._runtime.mark()

    def seconds_of(self, marks: Sequence[Any]) -> list[float]:
        """Times of ``mark``s on this process's ``time.perf_counter``; waits until the device has passed them."""
        return self._runtime.seconds_of(marks)

    def seconds_between(self, marks: Sequence[Any]) -> list[float]:
        """Time from each ``mark`` to the next.  Does not wait: the device must have passed all of them."""
        return self._runtime.seconds_between(marks)

    def profiler(self, directory: str, name: str) -> Any:
        """A profiler of host and device; ``stop`` after ``start`` writes a trace of ``name``."""
        return self.platform.profiler(directory, name)

    def max_memory_bytes(self) -> int:
        """Peak memory of this process: allocated on the device, or resident on the CPU."""
        return self._runtime.max_memory_bytes()

    def synchronize(self) -> None:
        """Wait for the device; used around timings in benchmarks only, never in training."""
        self._runtime.synchronize()

    def seed(self, seed: int) -> None:
        """Seed all random number generators of this process: Python, numpy, torch and torch on the device.

        Training draws nothing from them; they are seeded so that equal runs save equal files.
        """
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def random_states(self) -> dict[str, Tensor]:
        """States of all random number generators of this process: Python, numpy, torch and torch on the device."""
        _, words, _ = random.getstate()
        numpy_state: Any = np.random.get_state(legacy=False)  # typed as if it could be the old tuple
        key, position = numpy_state["state"]["key"].tolist(), numpy_state["state"]["pos"]
        states = {
            "python": torch.tensor(words, dtype=torch.int64),
            "numpy": torch.tensor([*key, position], dtype=torch.int64),
            "torch": torch.get_rng_state(),
        }
        own = self._runtime.random_state()
        return states if own is None else {**states, "device": own}

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        """Restore the states that ``random_states`` returned."""
        version, _, _ = random.getstate()
        random.setstate((version, tuple(states["python"].tolist()), None))
        *keys, position = states["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
        torch.set_rng_state(states["torch"])
        if "device" in states:
            self._runtime.set_random_state(states["device"])
