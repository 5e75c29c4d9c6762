"""Optimizer states in host memory, which pass through the device a block at a time, to be updated there.

While one block is updated and copied back, the next one arrives, so two are on the device at a time::

    to the device    block 1 | block 2           | block 3           |
    Adam                     | block 1 |         | block 2 |         | block 3 |
    to the host                        | block 1 |         | block 2 |         | block 3

The results equal those of the same kernel with states on the device.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mm.checkpoint.host_copies import host_segment, places_in_segments
from mm.device.device import Device


def host_memory(device: Device, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Flat tensors of zeros in host memory, pinned on an accelerator; ``sizes``: their numbers of elements and dtypes.

    Raises UserError if this node has too little memory.
    """
    sizes_bytes = [num_elements * dtype.itemsize for num_elements, dtype in sizes]
    places, segments_bytes = places_in_segments(sizes_bytes)
    needs = (f"--optimizer-cpu-offload keeps {sum(segments_bytes):,} bytes of this rank's optimizer states in host "
             f"memory")
    cure = ("give the ranks of this node more memory, lower --optimizer-offload-fraction, or shard the states over "
            "more ranks (--data-parallel-sharding-strategy optim)")
    segments = [host_segment(device.runtime, num_bytes, needs, cure).zero_() for num_bytes in segments_bytes]
    return [segments[segment][start : start + num_bytes].view(dtype)
            for (segment, start), num_bytes, (_, dtype) in zip(places, sizes_bytes, sizes, strict=True)]


class HostStatesPass:
    """Moves blocks from host memory through the device and back."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._coming, self._going = device.runtime.side_queue(), device.runtime.side_queue()
        self._leaving: list[Callable[[], Tensor]] = []
        """Waits for the last block that was copied back; blocks are copied back in order."""

    def through(self, blocks: Sequence[Sequence[Tensor]], compute: Callable[[int, list[Tensor]], None]) -> None:
        """Call ``compute`` for each block, with its number and copies on the device, which are then copied back to the
        tensors in host memory.  ``wait`` waits for that."""
        coming = self._fetched(blocks[0]) if blocks else []
        for number, block in enumerate(blocks):
            self._coming.join()
            self._going.join()  # the previous block's memory is free
            here = coming
            coming = self._fetched(blocks[number + 1]) if number + 1 < len(blocks) else []
            compute(number, here)
            self._going.mark()
            with self._going.behind_mark():
                self._leaving = [self._device.runtime.start_copying_back(one, host)
                                 for one, host in zip(here, block, strict=True)] or self._leaving
        self._going.join()

    def wait(self) -> None:
        """Wait until what has been computed so far has arrived in host memory."""
        for arrived in self._leaving:
            arrived()

    def _fetched(self, block: Sequence[Tensor]) -> list[Tensor]:
        """Copies of ``block``, which will be on the device after ``join``."""
        copies = [torch.empty(host.shape, dtype=host.dtype, device=self._device.torch_device) for host in block]
        self._coming.mark()
        with self._coming.behind_mark():
            for copy, host in zip(copies, block, strict=True):
                copy.copy_(host, non_blocking=True)
        return copies
