"""A device whose side streams are late: copies are made when somebody waits for them."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mm.device.device import Device


@dataclass(frozen=True)
class _LateCopy:
    into: Tensor
    storage: StorageWeakRef
    """It does not keep alive what is copied."""
    address: int


class LateQueue(TorchDispatchMode):
    """A side stream that copies nothing before ``join``.

    Memory that is not written yet, or was freed before it was read, is NaN in every dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[_LateCopy] = []

    def mark(self) -> None: ...

    @contextmanager
    def behind_mark(self) -> Iterator[None]:
        with self:
            yield

    def join(self) -> None:
        for one in self.copies:
            if one.storage.expired():
                _spoil(one.into)
            else:
                ctypes.memmove(one.into.data_ptr(), one.address, one.into.nbytes)
        self.copies.clear()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        into, given = args[:2]
        assert into.is_contiguous() and given.is_contiguous() and into.dtype == given.dtype
        is_read_before = any(abs(one.address - into.data_ptr()) < into.nbytes for one in self.copies)
        if not is_read_before:
            _spoil(into)
        self.copies.append(_LateCopy(into, StorageWeakRef(given.untyped_storage()), given.data_ptr()))
        return into


def _spoil(memory: Tensor) -> None:
    ctypes.memset(memory.data_ptr(), 255, memory.nbytes)


@dataclass(frozen=True)
class LateDevice(Device):
    """The CPU with such streams."""

    queues: list[LateQueue] = field(default_factory=list)

    @classmethod
    def new(cls) -> "LateDevice":
        return cls(**vars(Device.pick("cpu")))

    def side_queue(self) -> Any:
        self.queues.append(LateQueue())
        return self.queues[-1]

    def start_copying_back(self, tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        assert into is not None
        into.copy_(tensor)  # the last queue, in whose body this is, makes it late

        def arrived() -> Tensor:
            self.queues[-1].join()
            return into

        return arrived
