"""The checksums of Matroska files: an optional one per cluster, which FFmpeg writes but does not verify.

Only the element structure is parsed; the contents of clusters are not.
"""

import bisect
import os
import zlib
from typing import IO

_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
_CRC = b"\xbf\x84"
"""The header of a checksum element: its id, and its size of 4 bytes.  It is the first element in its parent."""
_CRC_BYTES = 6


class ClusterChecksums:
    """Tells whether the cluster at an offset matches its checksum.  Reads each cluster at most once."""

    def __init__(self, path: str) -> None:
        self._path = path
        with open(path, "rb") as file:
            self._clusters = _clusters(file, os.path.getsize(path))
        """For those with a checksum: start of the content and its end, as offsets in the file."""
        self._is_damaged: dict[int, bool] = {}

    def is_damaged(self, place: int) -> bool:
        """Whether the byte at ``place`` is in a cluster whose checksum does not match; False without a checksum."""
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
    """Clusters up to the first element that is broken or has no size, as in live recordings."""
    found: list[tuple[int, int]] = []
    place = 0
    while place < num_bytes:
        mark, size, num_head_bytes = _head(file, place)
        start = place + num_head_bytes
        if mark is None or (size is None and mark != _SEGMENT):
            break
        if mark == _SEGMENT:  # its children follow
            place = start
            continue
        assert size is not None
        place = start + size
        if mark == _CLUSTER and place <= num_bytes and file.read(2) == _CRC:
            found.append((start, place))
    return found


def _head(file: IO[bytes], place: int) -> tuple[int | None, int | None, int]:
    """Id and size of the element at ``place``, and the bytes that both take; None if broken or of unknown size."""
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
    """The length of a number whose first byte is ``first``: the number of leading zero bits plus one."""
    return 9 - first[0].bit_length() if first else 0
