"""The way of optimizer states through a device whose side streams are late: copies are made when somebody waits."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from mm.device.device import Device
from mm.errors import UserError
from mm.training.passage import Passage, host_memory
from tests.stand_ins.late import LateDevice


@pytest.mark.parametrize("sizes", [[(3, 2)], [(3,), (4, 1), (2,)], [(2,), (), (5, 1), ()], []], ids=str)
def test_each_block_is_there_when_it_is_computed_on_and_arrives(sizes: list[tuple[int, ...]]) -> None:
    device = LateDevice.new()
    passage = Passage(device)
    flat = iter(host_memory(device, [(size, torch.float32) for block in sizes for size in block]))
    blocks = [[next(flat) for _ in block] for block in sizes]
    for step in range(1, 4):

        def compute(number: int, states: list[Tensor], step: int = step) -> None:
            assert len(states) == len(blocks[number])
            for state, host in zip(states, blocks[number], strict=True):
                assert state.tolist() == [10.0 * number * (step - 1)] * len(host)
                assert state.data_ptr() != host.data_ptr()
                state += 10.0 * number

        passage.through(blocks, compute)
        passage.arrival()()
        for number, block in enumerate(blocks):
            assert all(host.tolist() == [10.0 * number * step] * len(host) for host in block)


@dataclass(frozen=True)
class AskedDevice(Device):
    """Notes which copies to the host were waited for, by their numbers."""

    asked: list[int] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def start_copying_back(self, tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        number, arrived = next(self.numbers), super().start_copying_back(tensor, into)
        return lambda: (self.asked.append(number), arrived())[1]


def test_a_wait_is_for_what_was_computed_before_it_was_asked_for() -> None:
    """A dying rank saves the last update that its device has done; the next one is queued, and may never be done."""
    device = AskedDevice(**vars(Device.pick("cpu")))
    passage, (state,) = Passage(device), host_memory(device, [(2, torch.float32)])
    passage.arrival()()
    passage.through([[state], []], lambda _, states: None)
    wait = passage.arrival()
    passage.through([[state]], lambda _, states: None)
    wait()
    assert device.asked == [0]
    passage.arrival()()
    assert device.asked == [0, 1]


def test_too_little_host_memory_is_named() -> None:
    @dataclass(frozen=True)
    class Full(Device):
        def host_buffer(self, num_bytes: int) -> Tensor | None:
            raise RuntimeError("CUDA error: out of memory")

    said = "keeps 4,096 bytes of this rank's optimizer states in host memory, and 4,096 bytes of it cannot be allocated"
    with pytest.raises(UserError, match=said):
        host_memory(Full(**vars(Device.pick("cpu"))), [(1024, torch.float32)])
