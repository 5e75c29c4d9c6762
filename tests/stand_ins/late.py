"""A device whose side streams are late: copies are made when somebody waits for them."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mm.device.cpu import CPU, HostRuntime
from mm.device.device import Device


@dataclass(frozen=True)
class _LateCopy:
    """It keeps neither tensor alive."""

    into: StorageWeakRef
    into_address: int
    given: StorageWeakRef
    given_address: int
    num_bytes: int


class LateQueue(TorchDispatchMode):
    """A side stream that copies nothing before ``join``.

    Memory that is not written yet, or was freed before it was read, is NaN in every dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[_LateCopy] = []
        self.num_after_free = 0
        """Copies from or into memory that was freed before they were made: a device would read or overwrite what has it
        then, or memory that is unmapped."""

    def record_event(self) -> None: ...

    @contextmanager
    def after_event(self) -> Iterator[None]:
        with self:
            yield

    def join(self) -> None:
        for one in self.copies:
            is_lost = one.into.expired(), one.given.expired()
            self.num_after_free += any(is_lost)
            if is_lost == (False, True):
                _spoil(one.into_address, one.num_bytes)
            elif is_lost == (False, False):
                ctypes.memmove(one.into_address, one.given_address, one.num_bytes)
        self.copies.clear()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        into, given = args[:2]
        assert into.is_contiguous() and given.is_contiguous() and into.dtype == given.dtype
        is_read_before = any(abs(one.given_address - into.data_ptr()) < into.nbytes for one in self.copies)
        if not is_read_before:
            _spoil(into.data_ptr(), into.nbytes)
        self.copies.append(_LateCopy(
            StorageWeakRef(into.untyped_storage()), into.data_ptr(),
            StorageWeakRef(given.untyped_storage()), given.data_ptr(), into.nbytes))
        return into


def _spoil(address: int, num_bytes: int) -> None:
    ctypes.memset(address, 255, num_bytes)


class LateRuntime(HostRuntime):
    """The CPU with such streams."""

    def __init__(self, _: int) -> None:
        self.queues: list[LateQueue] = []

    @property
    def num_after_free(self) -> int:
        """Summed over its queues; see ``LateQueue``."""
        return sum(queue.num_after_free for queue in self.queues)

    def side_stream(self) -> Any:
        self.queues.append(LateQueue())
        return self.queues[-1]

    def start_copying_back(self, tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        assert into is not None
        into.copy_(tensor)  # the last queue, in whose body this is, makes it late

        def arrived() -> Tensor:
            self.queues[-1].join()
            return into

        return arrived


def late_device() -> Any:
    """The CPU with a ``LateRuntime``."""
    return replace(Device.pick("cpu"), platform=replace(CPU, runtime=LateRuntime))
