"""``--async-save``: a thread of each rank writes a checkpoint from copies in host memory while training continues.

No thread communicates.  Each step's update tells all ranks whether one still writes (``Ballot``), so they commit after
the same step.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mm.device.device import Device
from mm.errors import UserError
from mm.formats.blocks import ON_HOST, Values
from mm.formats.training import CheckpointTensor, Retention
from mm.parallel.agreement import together
from mm.parallel.mesh import Mesh
from mm.training.save import BegunSave, ToWrite

_ALIGN_BYTES = 64
"""Alignment of copies in a segment; enough for any dtype."""


def places_in_segments(sizes_bytes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Where tensors of these sizes are copied: the segment and byte offset of each, and the size of each segment.

    Sizes of segments are powers of two, because torch rounds pinned memory up to one; a single segment could take
    nearly twice the memory.  First-fit by decreasing size.
    """
    aligned = [-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes_bytes]
    capacity = _power_of_two(max(aligned, default=0))
    used: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for index in sorted(range(len(aligned)), key=lambda one: -aligned[one]):
        segment = next((one for one, filled in enumerate(used) if filled + aligned[index] <= capacity), len(used))
        if segment == len(used):
            used.append(0)
        places[index] = (segment, used[segment])
        used[segment] += aligned[index]
    return [places[index] for index in range(len(aligned))], [_power_of_two(filled) for filled in used]


def _power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``; 0 for 0."""
    return 1 << (value - 1).bit_length() if value else 0


class HostCopies:
    """Host memory for one copy of what a rank saves: pinned on an accelerator, allocated by the first save and kept."""

    def __init__(self, device: Device) -> None:
        self._device, self._segments = device, list[Tensor]()

    @property
    def num_bytes(self) -> int:
        """Memory that is allocated now."""
        return sum(len(segment) for segment in self._segments)

    def take(self, tensors: ToWrite) -> ToWrite:
        """Copy the values of ``tensors``; returns when the copies are complete.  Earlier copies are overwritten."""
        flats = [values.live.detach().reshape(-1) for _, values in tensors]
        places, sizes_bytes = places_in_segments([flat.nbytes for flat in flats])
        if sizes_bytes != [len(segment) for segment in self._segments]:
            self._segments = []  # freed before the new memory is allocated
            self._segments = [self._memory(num_bytes) for num_bytes in sizes_bytes]
        into = [self._segments[segment][at : at + flat.nbytes].view(flat.dtype)
                for flat, (segment, at) in zip(flats, places, strict=True)]
        arriving = [self._device.start_copying_back(flat, memory) for flat, memory in zip(flats, into, strict=True)]
        return [(tensor, Values(arrived(), values.memory, values.start))
                for (tensor, values), arrived in zip(tensors, arriving, strict=True)]

    def _memory(self, num_bytes: int) -> Tensor:
        try:
            pinned = self._device.host_buffer(num_bytes)
            return torch.empty(num_bytes, dtype=torch.uint8) if pinned is None else pinned
        except RuntimeError as error:
            raise UserError(f"--async-save needs host memory for one copy of what this rank saves, and {num_bytes:,} "
                            f"bytes of it cannot be allocated ({error}); remove the flag, or give the ranks of this "
                            f"node more memory") from error


@dataclass(frozen=True)
class _WrittenSave:
    """A save that a thread writes."""

    begun: BegunSave
    retention: Retention
    tensors: ToWrite
    """Copies."""
    written: Future[list[CheckpointTensor]]

    def run(self) -> None:
        """Write the files, in the thread."""
        try:
            self.written.set_result(self.begun.write(self.tensors, ON_HOST))
        except BaseException as error:  # raised on all ranks by the commit
            self.written.set_exception(error)


class BackgroundSaves:
    """The saves that are being written: all of one iteration, so one copy in memory is enough."""

    def __init__(self, device: Device) -> None:
        self._copies = HostCopies(device)
        self._pending: list[_WrittenSave] = []

    @property
    def iteration(self) -> int | None:
        """The iteration being saved; None if no save is pending.  The same on all ranks."""
        return self._pending[0].begun.manifest.iteration if self._pending else None

    @property
    def is_writing(self) -> bool:
        """Whether this rank has files to write."""
        return any(not one.written.done() for one in self._pending)

    @property
    def copy_bytes(self) -> int:
        """Host memory that the copies take on this rank."""
        return self._copies.num_bytes

    def begin(self, begun: BegunSave, retention: Retention, mesh: Mesh) -> None:
        """Copy the tensors and start writing.  Pending saves must be of the same iteration; they share their copy.

        Raises UserError on every rank if one has too little memory.
        """
        assert self.iteration in (None, begun.manifest.iteration), "the earlier save must be committed first"
        before = list(self._pending)
        copies = together(mesh, lambda: self._copies.take(begun.tensors)) if not before else [
            (tensor, values) for (tensor, _), (_, values) in zip(begun.tensors, before[0].tensors, strict=True)]
        pending = _WrittenSave(begun, retention, copies, Future())
        self._pending.append(pending)
        threading.Thread(target=_run, args=(pending, before), name="save", daemon=True).start()

    def commit(self, mesh: Mesh) -> list[Path]:
        """Commit what is pending, together with all ranks, and return the checkpoints; waits until they are written.

        Raises UserError on every rank if one could not write.
        """
        pending, self._pending = self._pending, []
        return [one.begun.commit(mesh, one.written.result, one.retention) for one in pending]


def _run(pending: _WrittenSave, before: Sequence[_WrittenSave]) -> None:
    """Write one save after another, so that they do not compete for the disk."""
    for one in before:
        one.written.exception()  # waits
    pending.run()
