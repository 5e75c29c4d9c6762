"""The checksums that Matroska files may carry: one for each cluster, which FFmpeg writes and does not check.

Only the frame of the file is read here; what the clusters hold is not looked at.
"""

import bisect
import os
import zlib
from typing import IO

_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
_CRC = b"\xbf\x84"
"""How a checksum begins: its mark, and its size of 4 bytes.  It is the first thing in what it is for."""
_CRC_BYTES = 6


class ClusterChecksums:
    """Says whether the cluster at a place in a file is what was written there.  Reads each cluster at most once."""

    def __init__(self, path: str) -> None:
        self._path = path
        with open(path, "rb") as file:
            self._clusters = _clusters(file, os.path.getsize(path))
        """Of those with a checksum: where each begins behind its size, and where it ends."""
        self._is_damaged: dict[int, bool] = {}

    def is_damaged(self, place: int) -> bool:
        """Whether the byte at ``place`` lies in a cluster that its checksum does not fit; False without a checksum."""
        number = bisect.bisect_right(self._clusters, (place, 1 << 63)) - 1
        if number < 0 or place >= self._clusters[number][1]:
            return False
        if number not in self._is_damaged:
            self._is_damaged[number] = not self._fits(*self._clusters[number])
        return self._is_damaged[number]

    def _fits(self, start: int, end: int) -> bool:
        with open(self._path, "rb") as file:
            file.seek(start)
            content = file.read(end - start)
        stated = int.from_bytes(content[2:_CRC_BYTES], "little")
        return len(content) == end - start and zlib.crc32(memoryview(content)[_CRC_BYTES:]) == stated


def _clusters(file: IO[bytes], num_bytes: int) -> list[tuple[int, int]]:
    """Up to the first element that is broken or has no size, as live recordings have."""
    found: list[tuple[int, int]] = []
    place = 0
    while place < num_bytes:
        mark, size, num_head_bytes = _head(file, place)
        start = place + num_head_bytes
        if mark is None or (size is None and mark != _SEGMENT):
            break
        if mark == _SEGMENT:  # its parts come next
            place = start
            continue
        assert size is not None
        place = start + size
        if mark == _CLUSTER and place <= num_bytes and file.read(2) == _CRC:
            found.append((start, place))
    return found


def _head(file: IO[bytes], place: int) -> tuple[int | None, int | None, int]:
    """Mark and size of the element at ``place``, and how many bytes both take; None for what is broken or unknown."""
    file.seek(place)
    head = file.read(12)
    mark_bytes = _num_bytes(head[:1])
    size_bytes = _num_bytes(head[mark_bytes : mark_bytes + 1])
    if not 1 <= mark_bytes <= 4 or not 1 <= size_bytes <= 8 or len(head) < mark_bytes + size_bytes:
        return None, None, 0
    unknown = (1 << 7 * size_bytes) - 1
    size = int.from_bytes(head[mark_bytes : mark_bytes + size_bytes], "big") & unknown
    file.seek(place + mark_bytes + size_bytes)
    mark = int.from_bytes(head[:mark_bytes], "big")
    return mark, None if size == unknown else size, mark_bytes + size_bytes


def _num_bytes(first: bytes) -> int:
    """The length of a number that begins with the byte ``first``: one more than the zero bits in front of it."""
    return 9 - first[0].bit_length() if first else 0
