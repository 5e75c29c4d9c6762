"""What the trainer must know of a kind of device: the interface that ``cpu.py``, ``cuda.py`` and ``npu.py`` fill in.

Nothing outside of these three files asks which device it runs on: it asks the platform for a fact, or calls a function
of it.  A new device is a file beside them with a ``Platform`` of its own, and its place in ``platforms.py``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mm.device.deterministic import Variable
from mm.device.kernels import Fuse, Kernels
from mm.device.shims import Shim
from mm.device.side import SideQueue

Finding = tuple[bool, str]
"""Whether a run would certainly end, and what the user reads."""


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


class Runtime(Protocol):
    """How one process moves data to and from its device, waits for it and asks about it.

    ``Device`` describes the methods, under the same names.
    """

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def name(self) -> str: ...

    def copy(self, tensor: Tensor) -> Tensor: ...

    def pin(self, tensor: Tensor) -> Tensor: ...

    def host_buffer(self, num_bytes: int) -> Tensor | None: ...

    def start_copying_back(self, tensor: Tensor, into: Tensor | None) -> Callable[[], Tensor]: ...

    def side_queue(self) -> SideQueue: ...

    def mark(self) -> Any: ...

    def seconds_of(self, marks: Sequence[Any]) -> list[float]: ...

    def synchronize(self) -> None: ...

    def max_memory_bytes(self) -> int: ...

    def random_state(self) -> Tensor | None:
        """The state of the device's own random number generator; None where torch's on the host is the only one."""
        ...

    def set_random_state(self, state: Tensor) -> None: ...


@dataclass(frozen=True, eq=False)
class Platform:
    """A kind of device.  No member has a default, so that a new device states each of them."""

    name: str
    """As torch names its devices, and as ``--device`` does."""
    backend: str
    """torch.distributed's backend for tensors on the device."""

    # What is here, and what a run may meet

    fault: Callable[[], str | None]
    """Why this process can use no such device, and what to do about it; None: it can."""
    versions: Callable[[], dict[str, str]]
    """Versions of the device's own libraries that are installed here, whether or not the device is used."""
    version_findings: Callable[[Mapping[str, str]], Iterator[Finding]]
    """Which of these versions of packages and libraries do not go together."""
    known_devices: tuple[KnownDevice, ...]
    """Its types with peak and memory; empty where no peak is published, as for CPUs."""

    # Before the first work on it

    prepare: Callable[[int], None]
    """Choose the device of this index for the process, and set what its libraries need.  Raises UserError for a device
    that is too old."""
    shims: tuple[Shim, ...]
    """What megatron needs replaced."""
    deterministic_variables: Mapping[str, Variable]
    """What ``--deterministic-mode`` sets for its libraries."""
    switches: Callable[[], dict[str, bool]]
    """What ``prepare`` has turned off, read where the libraries keep it."""

    # Operators

    compiles_leaves: bool
    """Whether torch.compile makes one kernel of each leaf."""
    kernels: Callable[[Fuse | None], Kernels]
    """``fuse`` makes one kernel of a leaf, where leaves are compiled.  None: they run eagerly."""
    sdpa_kv_heads: Callable[[torch.dtype, int, int], int | None]
    """(dtype, query heads, key/value heads): how many of the latter attention gives to torch's SDPA; None where
    attention is not torch's."""
    adam_obeys_scale: bool
    """Whether torch's fused AdamW obeys ``grad_scale`` and ``found_inf`` here."""

    # How it works beside the host and other ranks

    runtime: Callable[[int], Runtime]
    """For the device of this index."""
    profiler: Callable[[str, str], Any]
    """(directory, name of the trace): a profiler of host and device with ``start`` and ``stop``."""
    starts_messages_ahead: bool
    """Whether stages post receives early by default; the command line can override it."""
    max_message_ctas: int | None
    """Multiprocessors that a group for pipeline messages may occupy; None: the backend's default."""


def torch_profiler(directory: str, name: str) -> Any:
    """A ``Platform.profiler``: torch's."""
    return torch.profiler.profile(on_trace_ready=torch.profiler.tensorboard_trace_handler(directory, name))
