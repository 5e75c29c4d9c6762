"""One message between two stages, as the step's plan describes it: text for reports, a header for ``--check-p2p``."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mm.batch import samples_text

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class MessageError(RuntimeError):
    """A stage sent something other than what its neighbour expects: their step plans differ."""


@dataclass(frozen=True)
class Transfer:
    """One message that this rank sends or receives; its ``shape`` is None if the boundary carries nothing."""

    is_sent: bool
    is_gradient: bool
    microbatch: int
    chunk: int
    """Chunk on this rank."""
    boundary: int
    """The slot behind this boundary: slot b receives activations over boundary b and sends gradients back over it."""
    peer: int
    """Global rank."""
    peer_stage: int
    shape: tuple[int, int] | None
    samples: tuple[int, ...]
    """The microbatch's samples."""

    def text(self, dtype: torch.dtype) -> str:
        """One line for a report."""
        verb, way = ("sends", "to") if self.is_sent else ("waits for", "from")
        return (f"{verb} {_name(self.is_gradient, self.microbatch, self.boundary)} {way} rank {self.peer} "
                f"(stage {self.peer_stage}), {_shown(self.shape, dtype)}{samples_text(self.samples)}")

    def header(self, tensor: Tensor | None) -> list[int]:
        """What both sides must agree on; ``tensor`` is the one to send, or the buffer to receive into."""
        what = [-1] * 3 if tensor is None else [_DTYPES.index(tensor.dtype), *tensor.shape]
        return [self.boundary, self.microbatch, int(self.is_gradient), *what]


def difference(transfer: Transfer, stage: int, expected: Sequence[int], found: Sequence[int]) -> str | None:
    """Compare the header that ``stage`` expects with the one it received; None if they agree, else an error message."""
    if list(expected) == list(found):
        return None
    return (f"--check-p2p: stage {stage} expected from stage {transfer.peer_stage} (rank {transfer.peer}) "
            f"{_read(expected)}; found {_read(found)}: the two stages do not follow the same plan")


def _read(header: Sequence[int]) -> str:
    boundary, microbatch, is_gradient, dtype, *shape = header
    tensor = _shown(None, torch.float32) if dtype < 0 else _shown((shape[0], shape[1]), _DTYPES[dtype])
    return f"{_name(bool(is_gradient), microbatch, boundary)}, {tensor}"


def _name(is_gradient: bool, microbatch: int, boundary: int) -> str:
    what = "gradient" if is_gradient else "activation"
    return f"the {what} of microbatch {microbatch} between slots {boundary - 1} and {boundary}"


def _shown(shape: tuple[int, int] | None, dtype: torch.dtype) -> str:
    return "nothing" if shape is None else f"{list(shape)} {str(dtype).removeprefix('torch.')}"
