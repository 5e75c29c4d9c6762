"""Copies in host memory of what a save writes, so that training may go on while they are written."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mm.checkpoint.pipelined_write import Host, Values
from mm.errors import UserError

ALIGN_BYTES = 64
"""Alignment of tensors in a segment; enough for any dtype."""
_LARGEST_BYTES = 4 << 30
"""Largest size of a segment, unless a single tensor is larger."""


def places_in_segments(sizes_bytes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Where tensors of these sizes are copied: the segment and byte offset of each, and the size of each segment.

    Sizes of segments are powers of two, because torch rounds pinned memory up to one; a single segment could take
    nearly twice the memory.  First-fit by decreasing size.  A new segment is no larger than what is left to place,
    unless a single tensor needs it.
    """
    aligned = [-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes_bytes]
    left = sum(aligned)
    used, capacities = list[int](), list[int]()
    places: dict[int, tuple[int, int]] = {}
    for index in sorted(range(len(aligned)), key=lambda one: -aligned[one]):
        size = aligned[index]
        segment = next((one for one, filled in enumerate(used) if filled + size <= capacities[one]), len(used))
        if segment == len(used):
            used.append(0)
            capacities.append(max(_power_of_two(size), min(_LARGEST_BYTES, _power_of_two(left + 1) // 2)))
        places[index] = (segment, used[segment])
        used[segment] += size
        left -= size
    return [places[index] for index in range(len(aligned))], [_power_of_two(filled) for filled in used]


def _power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``; 0 for 0."""
    return 1 << (value - 1).bit_length() if value else 0


def host_segment(host: Host, num_bytes: int, needs: str, cure: str) -> Tensor:
    """Host memory as bytes, pinned on an accelerator.

    Raises UserError if it cannot be allocated.  The message begins with ``needs``, what needs the memory, and ends
    with ``cure``, what to do.
    """
    try:
        pinned = host.host_buffer(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8) if pinned is None else pinned
    except RuntimeError as error:
        raise UserError(f"{needs}, and {num_bytes:,} bytes of it cannot be allocated ({error}); {cure}") from error


class HostCopies:
    """Host memory for one copy of what a rank saves, pinned on an accelerator; allocated by the first save and kept."""

    def __init__(self, host: Host) -> None:
        self._host, self._segments = host, list[Tensor]()

    @property
    def num_bytes(self) -> int:
        """Memory that is allocated now."""
        return sum(len(segment) for segment in self._segments)

    def take(self, live: Sequence[Values]) -> list[Values]:
        """Copies of ``live``; returns when they are complete.  Earlier copies are overwritten.

        Values that are copies already are returned unchanged.
        """
        changing = [values for values in live if not values.is_copy]
        copies = iter(self._copied(changing))
        return [values if values.is_copy else next(copies) for values in live]

    def _copied(self, live: Sequence[Values]) -> list[Values]:
        flats = [values.live.detach().reshape(-1) for values in live]
        places, sizes_bytes = places_in_segments([flat.nbytes for flat in flats])
        if sizes_bytes != [len(segment) for segment in self._segments]:
            self._segments = []  # freed before the new memory is allocated
            self._segments = [host_segment(
                self._host, num_bytes, "--async-save needs host memory for one copy of what this rank saves",
                "remove the flag, or give the ranks of this node more memory") for num_bytes in sizes_bytes]
        into = [self._segments[segment][at : at + flat.nbytes].view(flat.dtype)
                for flat, (segment, at) in zip(flats, places, strict=True)]
        arriving = [self._host.start_copying_back(flat, memory) for flat, memory in zip(flats, into, strict=True)]
        return [Values(arrived(), values.memory, values.start)
                for values, arrived in zip(live, arriving, strict=True)]
