"""Messages that start together, and what to wait for afterwards.

When which message goes where is not known here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from mm.parallel.checked import Transfer


@dataclass
class Arriving:
    """A message that this rank has asked for, or one that carries nothing."""

    due: Transfer
    tensor: Tensor | None
    works: list[dist.Work] = field(default_factory=list)
    """What to wait for; empty where nothing moves."""


class Batch:
    """Messages of one process group that start together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.operations: list[dist.P2POp] = []
        self.transfers: list[tuple[Transfer, Tensor | None]] = []
        """Every message, also one that carries nothing, with its tensor."""
        self.group = group
        self._receiving: dict[int, Arriving] = {}
        """By number of the operation."""

    def send(self, due: Transfer, tensor: Tensor | None) -> None:
        self._add(due, None if tensor is None else tensor.contiguous())

    def receive(self, due: Transfer, tensor: Tensor | None) -> Arriving:
        """``tensor`` is where the message will be; None when nothing comes."""
        arriving = Arriving(due, tensor)
        if self._add(due, tensor):
            self._receiving[len(self.operations) - 1] = arriving
        return arriving

    def _add(self, due: Transfer, tensor: Tensor | None) -> bool:
        """Returns whether anything moves."""
        self.transfers.append((due, tensor))
        if tensor is None or not tensor.numel():
            return False
        self.operations.append(dist.P2POp(dist.isend if due.is_sent else dist.irecv, tensor, due.peer, self.group))
        return True

    def start(self) -> list[tuple[dist.Work, Tensor]]:
        """Begin all of it.  Returns what is sent, with what to wait for."""
        works = dist.batch_isend_irecv(self.operations) if self.operations else []
        if len(works) < len(self.operations):  # NCCL and HCCL give one for all
            works *= len(self.operations)
        for number, arriving in self._receiving.items():
            arriving.works.append(works[number])
        return [(work, operation.tensor) for number, (work, operation) in enumerate(zip(
            works, self.operations, strict=True)) if number not in self._receiving]


class Handle:
    """A gradient on its way, as megatron's schedule with chunks waits for it."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait
