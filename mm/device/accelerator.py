"""The runtime of a device with its own memory and streams, through torch's module for it: torch.cuda or torch.npu.

A second stream of the device, for copies beside the work of the main stream: inputs, states, activations.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class SideQueue:
    """A stream next to the computing one; on a device without streams, such as the CPU, all work runs immediately.

    ::

        computing stream   step 1 | join | mark | step 2                  | join | mark | step 3
        side stream                               copy inputs of step 3 (after the mark)

    The allocator reuses the side stream's memory as soon as its tensors die, when the computing stream may not have
    read them yet.  So new copies wait for a mark in that stream, set after the dead tensors' last use was queued.
    """

    def __init__(self, kind: str | None) -> None:
        """``kind``: the type of the current device, such as "cuda"; None if it has no streams."""
        self._kind = kind
        self._stream = None if kind is None else getattr(torch, kind).Stream()
        self._mark: Any = None

    def mark(self) -> None:
        """Mark the current stream: later side work waits for everything queued there so far, and nothing after."""
        if self._kind is not None:
            self._mark = getattr(torch, self._kind).Event()
            self._mark.record()

    @contextmanager
    def behind_mark(self) -> Iterator[None]:
        """Queue the body's work on the side stream; no tensor of an earlier body may die between mark and body."""
        if self._kind is None or self._stream is None:
            yield
            return
        if self._mark is None:
            self.mark()
        with getattr(torch, self._kind).stream(self._stream):
            self._stream.wait_event(self._mark)
            yield

    def join(self) -> None:
        """Make the current stream wait for everything queued on the side stream."""
        if self._kind is not None:
            getattr(torch, self._kind).current_stream().wait_stream(self._stream)


@dataclass(frozen=True)
class AcceleratorRuntime:
    """A ``mm.device.platform.Runtime``.  Work is queued; the host waits for it only where it reads a result."""

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
        """Copy through pinned memory, which torch keeps alive until the copy is done.

        A copy from ordinary memory makes the host wait for the work queued on the device; this one does not.  A tensor
        that is already pinned is not pinned again.
        """
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

    def side_queue(self) -> SideQueue:
        return SideQueue(self.kind)

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds_of(self, marks: Sequence[Any]) -> list[float]:
        last = self.mark()
        last.synchronize()
        now = time.perf_counter()
        return [now - mark.elapsed_time(last) / 1000 for mark in marks]

    def seconds_between(self, marks: Sequence[Any]) -> list[float]:
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]

    def synchronize(self) -> None:
        self._module.synchronize()

    def max_memory_bytes(self) -> int:
        return self._module.max_memory_allocated()

    def random_state(self) -> Tensor | None:
        return self._module.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state)
