"""Messages that start together, and the handles by which to wait for them."""

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from mm.parallel.checked import Transfer


@dataclass
class Arriving:
    """A posted receive, or a message that carries nothing."""

    due: Transfer
    tensor: Tensor | None
    works: list[dist.Work] = field(default_factory=list)
    """What to wait for; empty where nothing moves."""


class Batch:
    """Messages of one process group that start together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.operations: list[dist.P2POp] = []
        self.transfers: list[tuple[Transfer, Tensor | None]] = []
        """Every message with its tensor, including those that carry nothing."""
        self.group = group
        self._receiving: dict[int, Arriving] = {}
        """By index of the operation."""

    def send(self, due: Transfer, tensor: Tensor | None) -> None:
        self._add(due, None if tensor is None else tensor.contiguous())

    def receive(self, due: Transfer, tensor: Tensor | None) -> Arriving:
        """``tensor`` is the buffer to receive into; None if the message carries nothing."""
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
        """Start all operations.  Returns the tensors being sent, each with its handle."""
        works = dist.batch_isend_irecv(self.operations) if self.operations else []
        if len(works) < len(self.operations):  # NCCL and HCCL return one for all
            works *= len(self.operations)
        for number, arriving in self._receiving.items():
            arriving.works.append(works[number])
        return [(work, operation.tensor) for number, (work, operation) in enumerate(zip(
            works, self.operations, strict=True)) if number not in self._receiving]
