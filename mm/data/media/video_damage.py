"""What tells that a decoded frame is damaged.  Which frames are wanted, and where from, is not known here.

A decoder hides damage: it fills what it cannot read from the frames beside, and goes on.  Every later frame is made of
that one, up to the next key frame.  So a frame counts as sound only if nothing was found in any packet from its key
frame to its own.  What counts as found: a flag of container or decoder, an error of the decoder (also one that it only
logs), a checksum of Matroska, and zeros where the codec writes none.  Compressed data without checksums can be damaged
so that other pixels are decoded without a trace: docs/data.md has how often, for each codec.
"""

import bisect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from av import logging
from av.error import FFmpegError
from av.video.frame import PictureType

from mm.data.media.matroska import ClusterChecksums

_CHECKSUMS = {"err_detect": "crccheck"}
"""Setting of decoders that have FFmpeg compare the checksums of pictures, where encoders wrote them (HEVC)."""
_HARMLESS = ("unable to decode APP fields", "SEI type", "mmco: unref short failure", "number of reference frames")
"""Errors that FFmpeg logs of good files too: pictures are made of none of it, or other errors follow where they are."""
_ZEROS = {"hevc": re.compile(rb"\0{16}\0*[^\0\1]"), "vp9": re.compile(rb"\0{256}"), "vp8": re.compile(rb"\0{512}")}
"""What no encoder writes, of decoders that take it for pictures: a file system leaves zeros where a write was lost.

HEVC forbids three zeros in a row except before a start code.  In VP9 and VP8 this many would mean that thousands of
symbols in turn were the likeliest one; frames in which nothing moves say that shorter."""


class Watch:
    """Decodes a video stream and notices what is wrong.  ``damage`` is set for the frame that was given last."""

    def __init__(self, path: str, container: Any, stream: Any) -> None:
        self._container, self._stream = container, stream
        self._is_matroska = "matroska" in container.format.name
        self._checksums = ClusterChecksums(path) if self._is_matroska else None
        context = stream.codec_context
        context.copy_opaque = True  # a frame says of which packet it is
        if not context.is_open:
            context.options = {**context.options, **_CHECKSUMS}
        self._zeros = _ZEROS.get(context.codec.canonical_name)
        self.damage: str | None = None
        """Why the frame that was given last may have wrong pixels, or None."""
        self._signs = _Signs()

    def frames(self) -> Iterator[Any]:
        """Decoded frames with a time, from where the container stands."""
        signs, keys, number = _Signs(), _Keys(), -1
        self._signs = signs
        packets = self._container.demux(self._stream)
        while True:
            with heard() as said:
                packet = next(packets, None)
            if packet is None:
                return
            number += 1
            packet.opaque = number
            if packet.is_keyframe:
                keys.add(number, packet.dts if packet.pts is None else packet.pts)
            if said and self._is_matroska:  # packets between the one before and this one are lost
                signs.add(number - 1 if packet.is_keyframe else number, said[0])
            if packet.size and (sign := self._sign_of(packet)):
                signs.add(number, sign)
            frames: list[Any] = []
            with heard() as said:
                try:
                    frames = packet.decode()
                except FFmpegError as error:
                    signs.add(number, str(error.strerror))
            if said:
                signs.add(number, said[0])
            for frame in frames:
                frame.pts = frame.dts if frame.pts is None else frame.pts
                if frame.pts is None:
                    continue
                at = number if frame.opaque is None else frame.opaque
                if frame.is_corrupt:
                    signs.add(at, "its decoder says so")
                keys.show(at, frame)
                self.damage = signs.first(keys.needed(at, frame.pts), at)
                yield frame

    @property
    def latest_sign(self) -> str | None:
        """The last sign since the container was moved: why a frame may be missing."""
        return self._signs.latest

    def _sign_of(self, packet: Any) -> str | None:
        """What a packet tells before it is decoded."""
        if packet.is_corrupt:
            return "a part of its packet is missing"
        if self._checksums is not None and packet.pos is not None and self._checksums.is_damaged(packet.pos):
            return "the checksum in the file is another one"
        if self._zeros is not None and self._zeros.search(bytes(packet)):
            return "zeros stand in the place of its data"
        return None


class _Signs:
    """Signs of damage, by the number of their packet."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._signs: list[str] = []

    def add(self, number: int, sign: str) -> None:
        at = bisect.bisect_right(self._numbers, number)
        self._numbers.insert(at, number)
        self._signs.insert(at, sign)

    @property
    def latest(self) -> str | None:
        return self._signs[-1] if self._signs else None

    def first(self, start: int, last: int) -> str | None:
        """The first sign in packets ``start`` to ``last``, both included."""
        at = bisect.bisect_left(self._numbers, start)
        return self._signs[at] if at < len(self._numbers) and self._numbers[at] <= last else None


class _Keys:
    """The key frames so far."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._times: list[int | None] = []
        self._are_whole: list[bool] = []
        """Whether each was shown as a frame that needs no other.  A gradual refresh begins at a "key frame" too."""

    def add(self, number: int, time: int | None) -> None:
        self._numbers.append(number)
        self._times.append(time)
        self._are_whole.append(False)

    def show(self, number: int, frame: Any) -> None:
        """Note that the frame of packet ``number`` was decoded."""
        at = bisect.bisect_left(self._numbers, number)
        if at < len(self._numbers) and self._numbers[at] == number:
            self._are_whole[at] = frame.pict_type in (PictureType.I, PictureType.NONE)  # some codecs have no types

    def needed(self, number: int, time: int) -> int:
        """The first packet that the frame of packet ``number``, shown at ``time``, may be made of."""
        at = bisect.bisect_right(self._numbers, number) - 1
        if at >= 0 and (key_time := self._times[at]) is not None and time < key_time:
            at -= 1  # it is shown before its key frame, and may be made of frames before that
        while at >= 0 and not self._are_whole[at]:
            at -= 1
        return self._numbers[at] if at >= 0 else 0


@contextmanager
def heard() -> Iterator[list[str]]:
    """The errors that FFmpeg logs inside, but for harmless ones; they are there at its end."""
    said: list[str] = []
    logging.set_level(logging.ERROR)
    logging.set_skip_repeated(False)
    try:
        with logging.Capture(local=False) as messages:
            yield said
    finally:
        logging.set_level(None)
    said += [text.strip() for _, _, text in messages if not any(one in text for one in _HARMLESS)]
