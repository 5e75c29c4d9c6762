"""The way of optimizer states through a device whose side streams are late: copies are made when somebody waits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mm.device.cpu import CPU, HostRuntime
from mm.device.device import Device
from mm.errors import UserError
from mm.run.optim.block_adam import HostStatesPass, host_memory
from tests.stand_ins.late import late_device


@pytest.mark.parametrize("sizes", [[(3, 2)], [(3,), (4, 1), (2,)], [(2,), (), (5, 1), ()], []], ids=str)
def test_each_block_is_there_when_it_is_computed_on_and_arrives(sizes: list[tuple[int, ...]]) -> None:
    device = late_device()
    passage = HostStatesPass(device)
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
        passage.wait()
        for number, block in enumerate(blocks):
            assert all(host.tolist() == [10.0 * number * step] * len(host) for host in block)


def test_too_little_host_memory_is_named() -> None:
    class Full(HostRuntime):
        def host_buffer(self, num_bytes: int) -> Tensor | None:
            raise RuntimeError("CUDA error: out of memory")

    said = "keeps 4,096 bytes of this rank's optimizer states in host memory, and 4,096 bytes of it cannot be allocated"
    with pytest.raises(UserError, match=said):
        host_memory(replace(Device.pick("cpu"), platform=replace(CPU, runtime=Full)), [(1024, torch.float32)])
