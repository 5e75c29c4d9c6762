"""The interface of a kind of device, which ``cpu.py``, ``cuda.py`` and ``npu.py`` implement, and what they share.

A new device is one such file with its own ``Platform``, and an entry in ``mm.device.device.PLATFORMS``.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from mm.device.kernels import Fuse, Kernels
from mm.device.shims import Shim
from mm.errors import refuse


@dataclass(frozen=True)
class Variable:
    """An environment variable that a library reads when it starts on the device."""

    default: str
    others: tuple[str, ...] | None
    """Other values that a user may have set, in upper or lower case; None: any value is replaced."""
    reference: str


def make_deterministic(
    variables: Mapping[str, Variable], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Make the same run on the same machines give the same bits; call it before the first work on the device.

    Otherwise the order of sums may change from run to run: in attention's backward pass on CUDA (atomic additions), in
    libraries that pick an algorithm at run time, and in collectives that reduce inside the network.  Operators without
    a deterministic form then raise RuntimeError.  Raises UserError for a variable whose value lets results differ.
    """
    refuse(_nondeterministic(variables, environment))
    for name, variable in variables.items():
        if variable.others is None:
            environment[name] = variable.default
        else:
            environment.setdefault(name, variable.default)
    torch.use_deterministic_algorithms(True)


def _nondeterministic(variables: Mapping[str, Variable], environment: Mapping[str, str]) -> Iterator[str]:
    for name, variable in variables.items():
        if variable.others is None or name not in environment:
            continue
        legal = (variable.default, *variable.others)
        if environment[name].lower() not in [value.lower() for value in legal]:
            yield (f"--deterministic-mode is set, but the environment variable {name} is {environment[name]!r}, which "
                   f"lets results differ from run to run; unset it, or set it to one of {', '.join(legal)}")


MachineFinding = tuple[bool, str]
"""(whether a run would certainly fail, message for the user)"""


@dataclass(frozen=True)
class Links:
    """The links between devices of one type, in bytes per second per device and direction."""

    within: float
    """To the other devices of its node: NVLink, HCCS or PCIe, as published."""
    between: float
    """To other nodes.  This depends on the data center, so it assumes the usual network adapter per device."""
    node_size: int = 8


@dataclass(frozen=True)
class KnownDevice:
    """One type of accelerator."""

    label: str
    names: str
    """A regular expression for the whole name that its driver reports, without "NVIDIA " in front."""
    peak_flops: float | None
    """Dense bf16 FLOP/s with fp32 sums.  None: no published number was found."""
    memory_bytes: int | None
    """The whole memory: for NVIDIA's as nvidia-smi shows it, for others as the maker states it.  None: not found."""
    reference: str
    memory_bandwidth: float
    """Bytes per second, read and written together, as published."""
    links: Links


class SideStream:
    """A stream next to the computing one; on a device without streams, such as the CPU, all work runs immediately.

    ::

        computing stream   step 1 | join | event | step 2                  | join | event | step 3
        side stream                                copy inputs of step 3 (after the event)

    The allocator reuses the side stream's memory as soon as its tensors die, when the computing stream may not have
    read them yet.  So copies wait on an event recorded after the last use of the dead tensors.
    """

    def __init__(self, kind: str | None) -> None:
        """``kind``: the type of the current device, such as "cuda"; None if it has no streams."""
        self._kind = kind
        self._stream = None if kind is None else getattr(torch, kind).Stream()
        self._event: Any = None

    def record_event(self) -> None:
        """Later side work waits for everything queued on the current stream so far, and nothing after."""
        if self._kind is not None:
            self._event = getattr(torch, self._kind).Event()
            self._event.record()

    @contextmanager
    def after_event(self) -> Iterator[None]:
        """Queue the body's work on the side stream; no tensor of an earlier body may die between event and body."""
        if self._kind is None or self._stream is None:
            yield
            return
        if self._event is None:
            self.record_event()
        with getattr(torch, self._kind).stream(self._stream):
            self._stream.wait_event(self._event)
            yield

    def join(self) -> None:
        """Make the current stream wait for everything queued on the side stream."""
        if self._kind is not None:
            getattr(torch, self._kind).current_stream().wait_stream(self._stream)


class Runtime(Protocol):
    """How one process moves data to and from its device, waits for it and asks about it."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def name(self) -> str: ...

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the device; the host does not wait for the work queued there."""
        ...

    def pin(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to pinned memory, in any thread; on the CPU the result is the tensor itself."""
        ...

    def host_buffer(self, num_bytes: int) -> Tensor | None:
        """Pinned memory for ``start_copying_back``, as bytes; None on the CPU, whose tensors are on the host."""
        ...

    def start_copying_back(self, tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Start copying a tensor to the host; calling the result, in any thread, waits for the copy and returns it.

        The wait is for work queued before this call.  ``into``: memory for the copy, pinned on an accelerator; None
        allocates it, but on the CPU the result is then the tensor itself.
        """
        ...

    def side_stream(self) -> SideStream: ...

    def record_event(self) -> Any:
        """Record this moment; on an accelerator, the moment when all work queued on the current stream is done."""
        ...

    def seconds_of(self, events: Sequence[Any]) -> list[float]:
        """Times of events on this process's ``time.perf_counter``; waits until the device has passed them."""
        ...

    def seconds_between(self, events: Sequence[Any]) -> list[float]:
        """Time from each event to the next.  Does not wait: the device must have passed all of them."""
        ...

    def synchronize(self) -> None:
        """Wait for the device; used around timings only, never in training."""
        ...

    def max_memory_bytes(self) -> int:
        """Peak memory of this process: allocated on the device, or resident on the CPU."""
        ...

    def random_state(self) -> Tensor | None:
        """State of the device's random number generator; None if torch's on the host is the only one."""
        ...

    def set_random_state(self, state: Tensor) -> None: ...


@dataclass(frozen=True, eq=False)
class Platform:
    """A kind of device.  No member has a default, so that a new device states each of them."""

    name: str
    """Its name in ``torch.device`` and in ``--device``."""
    backend: str

    # Checks of the machine

    fault: Callable[[], str | None]
    """Why this process cannot use such a device, and what to do about it; None if it can."""
    versions: Callable[[], dict[str, str]]
    """Installed versions of the device's libraries, whether or not the device is used."""
    version_findings: Callable[[Mapping[str, str]], Iterator[MachineFinding]]
    """Findings about versions of packages and libraries that do not work together."""
    device_files: str
    """A pattern of the files that such devices have in /dev, whether or not they can be used; empty for none."""
    num_devices: Callable[[], int | None]
    """How many this process sees; None if any number of processes share one."""
    known_devices: tuple[KnownDevice, ...]
    """Its types with peak and memory; empty if no peaks are published, as for CPUs."""

    # Before the first work on it

    prepare: Callable[[int], None]
    """Choose the device of this index for the process, and configure its libraries.  Raises UserError for a device that
    is too old."""
    shims: tuple[Shim, ...]
    deterministic_variables: Mapping[str, Variable]
    """Environment variables that ``--deterministic-mode`` sets for its libraries."""
    switches: Callable[[], dict[str, bool]]
    """Settings that ``prepare`` turns off, as the libraries report them."""

    # Operators

    compiles_kernels: bool
    """Whether torch.compile turns each kernel function into one kernel."""
    kernels: Callable[[Fuse | None], Kernels]
    """Its operators, given ``fuse``, which turns a kernel function into one kernel; with None, they run eagerly."""
    sdpa_kv_heads: Callable[[torch.dtype, int, int], int | None]
    """(dtype, query heads, key/value heads) -> number of key/value heads that attention passes to torch's SDPA; None if
    it does not use SDPA."""
    adam_obeys_scale: bool
    """Whether torch's fused AdamW obeys ``grad_scale`` and ``found_inf`` here."""

    # Work together with the host and other ranks

    runtime: Callable[[int], Runtime]
    """Makes the runtime of the device of this index."""
    profiler: Callable[[str, str], Any]
    """(directory, name of the trace): a profiler of host and device with ``start`` and ``stop``."""
    starts_messages_ahead: bool
    """Whether stages post receives early by default; the command line can override it."""
    max_message_ctas: int | None
    """Most multiprocessors that a group for pipeline messages may occupy; None: the backend's default."""


@dataclass(frozen=True)
class AcceleratorRuntime:
    """A ``Runtime`` with its own memory and streams.  The host waits for queued work only where it reads a result."""

    kind: str
    """"cuda" or "npu": the device type, and the name of torch's module for it."""
    index: int

    @property
    def _module(self) -> Any:
        return getattr(torch, self.kind)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind, self.index)

    @property
    def name(self) -> str:
        return self._module.get_device_name(self.index)

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy through pinned memory, which torch keeps alive until the copy is done: so the host does not wait for the
        work queued on the device.  A tensor that is already pinned is not pinned again."""
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def pin(self, tensor: Tensor) -> Tensor:
        self._module.set_device(self.index)  # a new thread is on device 0, whose memory is not ours
        return tensor.pin_memory()

    def host_buffer(self, num_bytes: int) -> Tensor | None:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def start_copying_back(self, tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if into is None else into
        copy.copy_(tensor, non_blocking=True)
        copied = self._module.Event()
        copied.record()

        def on_host() -> Tensor:
            self._module.set_device(self.index)  # a new thread is on no device, or on device 0
            copied.synchronize()
            return copy

        return on_host

    def side_stream(self) -> SideStream:
        return SideStream(self.kind)

    def record_event(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds_of(self, events: Sequence[Any]) -> list[float]:
        last = self.record_event()
        last.synchronize()
        now = time.perf_counter()
        return [now - event.elapsed_time(last) / 1000 for event in events]

    def seconds_between(self, events: Sequence[Any]) -> list[float]:
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(events)]

    def synchronize(self) -> None:
        self._module.synchronize()

    def max_memory_bytes(self) -> int:
        return self._module.max_memory_allocated()

    def random_state(self) -> Tensor | None:
        return self._module.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state)


def torch_profiler(directory: str, name: str) -> Any:
    """A ``Platform.profiler`` by torch."""
    return torch.profiler.profile(on_trace_ready=torch.profiler.tensorboard_trace_handler(directory, name))
