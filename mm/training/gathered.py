"""Saves on rank 0's disk alone: ranks that do not see it send their tensors to rank 0, which writes them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm.errors import refuse
from mm.formats.blocks import ON_HOST, Values
from mm.formats.training import CheckpointTensor
from mm.parallel.agreement import attempt
from mm.parallel.mesh import Mesh
from mm.training.disks import Disks
from mm.training.save import BegunSave
from mm.training.step import Setup
from mm.weights.memory import MemoryLayout

_CHUNK_BYTES = 64 << 20
"""Bytes of one message."""

_Announced = tuple[CheckpointTensor, MemoryLayout | None, int, torch.dtype, int]
"""What a rank tells rank 0 of a tensor before sending it: its place in the checkpoint, ``memory`` and ``start`` of its
``Values``, its dtype and its number of elements."""


def finish_on_first(begun: BegunSave, setup: Setup, disks: Disks) -> Path:
    """Write and commit a save whose directory only rank 0's disk holds, together with all ranks.

    ``disks``: tells which ranks see that disk.  Rank 0 needs host memory for the tensors of one rank at a time.
    Results and errors are those of ``BegunSave.commit``.
    """
    mesh = setup.mesh
    written: list[CheckpointTensor] = []
    problems: list[str] = []
    if disks.own == 0:
        found, failed = attempt(mesh, lambda: begun.write(begun.tensors, setup.stage.device))
        written += found or []
        problems += failed
    else:
        _send(begun, mesh)
    for sender in range(mesh.world_size) if mesh.rank == 0 else ():
        if disks.of_ranks[sender] != 0:  # received even after a failure, because the sender waits
            tensors = list(_received(sender, mesh))
            found, failed = attempt(mesh, lambda tensors=tensors: begun.write(tensors, ON_HOST))
            written += found or []
            problems += failed

    def result() -> list[CheckpointTensor]:
        refuse(problems)
        return written

    return begun.commit(mesh, result)


def _send(begun: BegunSave, mesh: Mesh) -> None:
    announced: list[_Announced] = [
        (tensor, values.memory, values.start, values.live.dtype, values.live.numel())
        for tensor, values in begun.tensors]
    dist.send_object_list([announced], dst=0, group=mesh.control_group)
    for _, values in begun.tensors:
        for chunk in _chunks(values.live.detach().reshape(-1)):
            dist.send(chunk.cpu(), dst=0, group=mesh.control_group)


def _received(sender: int, mesh: Mesh) -> Iterator[tuple[CheckpointTensor, Values]]:
    announced: list[Any] = [None]
    dist.recv_object_list(announced, src=sender, group=mesh.control_group)
    of_sender: list[_Announced] = announced[0]
    for tensor, memory, start, dtype, num_elements in of_sender:
        live = torch.empty(num_elements, dtype=dtype)
        for chunk in _chunks(live):
            dist.recv(chunk, src=sender, group=mesh.control_group)
        yield tensor, Values(live, memory, start)


def _chunks(flat: Tensor) -> tuple[Tensor, ...]:
    """A flat tensor as bytes, in messages of limited size, which share its memory."""
    return flat.view(torch.uint8).split(_CHUNK_BYTES) if len(flat) else ()
