"""Messages between stages, as the step's plan describes them, and the handles by which to wait for them."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mm.batch import samples_text


@dataclass(frozen=True)
class Transfer:
    """One message that this rank sends or receives; its ``shape`` is None if the boundary carries nothing."""

    is_sent: bool
    is_gradient: bool
    microbatch: int
    chunk: int
    """Chunk on this rank."""
    boundary: int
    """Index of the receiving slot of activations: slot b also sends gradients back over boundary b."""
    peer: int
    """Global rank."""
    peer_stage: int
    shape: tuple[int, int] | None
    samples: tuple[int, ...]
    """The microbatch's samples."""

    def text(self, dtype: torch.dtype) -> str:
        """One line for a report."""
        verb, way = ("sends", "to") if self.is_sent else ("waits for", "from")
        what = "gradient" if self.is_gradient else "activation"
        shape = "nothing" if self.shape is None else f"{list(self.shape)} {str(dtype).removeprefix('torch.')}"
        return (f"{verb} the {what} of microbatch {self.microbatch} between slots {self.boundary - 1} and "
                f"{self.boundary} {way} rank {self.peer} (stage {self.peer_stage}), {shape}"
                f"{samples_text(self.samples)}")


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
