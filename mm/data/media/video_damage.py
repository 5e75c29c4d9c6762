"""Detects damage in decoded video frames.

Decoders hide damage: they fill in what they cannot read from neighbouring frames and continue.  All later frames up to
the next key frame depend on that one.  So a frame counts as sound only if no sign of damage was found in any packet
from its key frame to its own.  Signs are: a flag of the container or decoder, an error of the decoder (including those
that it only logs), a wrong Matroska checksum, and zeros where the codec never writes them.  Damage to compressed data
without checksums can change pixels without a trace: docs/data.md says how often, per codec.
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
"""Decoder option that makes FFmpeg verify picture checksums where the encoder wrote them (HEVC)."""
_HARMLESS = ("unable to decode APP fields", "SEI type", "mmco: unref short failure", "number of reference frames")
"""Errors that FFmpeg also logs for good files: they do not affect pixels, or real damage causes further errors."""
_ZEROS = {"hevc": re.compile(rb"\0{16}\0*[^\0\1]"), "vp9": re.compile(rb"\0{256}"), "vp8": re.compile(rb"\0{512}")}
"""Zero runs that no encoder writes, for decoders that accept them as data.  File systems leave zeros where a write was
lost.

HEVC forbids three zeros in a row except before a start code.  In VP9 and VP8 this many zeros would mean that thousands
of consecutive symbols were the likeliest one; static frames are encoded shorter than that."""


class Watch:
    """Decodes a video stream and detects damage.  ``damage`` refers to the frame yielded last."""

    def __init__(self, path: str, container: Any, stream: Any) -> None:
        self._container, self._stream = container, stream
        self._is_matroska = "matroska" in container.format.name
        self._checksums = ClusterChecksums(path) if self._is_matroska else None
        context = stream.codec_context
        context.copy_opaque = True  # lets a frame carry the number of its packet
        if not context.is_open:
            context.options = {**context.options, **_CHECKSUMS}
        self._zeros = _ZEROS.get(context.codec.canonical_name)
        self.damage: str | None = None
        """Why the frame yielded last may have wrong pixels, or None."""
        self._signs = _Signs()

    def frames(self) -> Iterator[Any]:
        """Decoded frames with a timestamp, from the container's current position."""
        signs, keys, number = _Signs(), _Keys(), -1
        self._signs = signs
        packets = self._container.demux(self._stream)
        while True:
            with logged_errors() as errors:
                packet = next(packets, None)
            if packet is None:
                return
            number += 1
            packet.opaque = number
            if packet.is_keyframe:
                keys.add(number, packet.dts if packet.pts is None else packet.pts)
            if errors and self._is_matroska:  # packets between the previous one and this one are lost
                signs.add(number - 1 if packet.is_keyframe else number, errors[0])
            if packet.size and (sign := self._sign_of(packet)):
                signs.add(number, sign)
            frames: list[Any] = []
            with logged_errors() as errors:
                try:
                    frames = packet.decode()
                except FFmpegError as error:
                    signs.add(number, str(error.strerror))
            if errors:
                signs.add(number, errors[0])
            for frame in frames:
                frame.pts = frame.dts if frame.pts is None else frame.pts
                if frame.pts is None:
                    continue
                at = number if frame.opaque is None else frame.opaque
                if frame.is_corrupt:
                    signs.add(at, "its decoder reports it as corrupt")
                keys.show(at, frame)
                self.damage = signs.first(keys.needed(at, frame.pts), at)
                yield frame

    @property
    def latest_sign(self) -> str | None:
        """The last sign of damage since the last seek: explains a missing frame."""
        return self._signs.latest

    def _sign_of(self, packet: Any) -> str | None:
        """Signs of damage in a packet that show before it is decoded."""
        if packet.is_corrupt:
            return "part of its packet is missing"
        if self._checksums is not None and packet.pos is not None and self._checksums.is_damaged(packet.pos):
            return "its checksum does not match"
        if self._zeros is not None and self._zeros.search(bytes(packet)):
            return "its data were replaced by zeros"
        return None


class _Signs:
    """Signs of damage by packet number."""

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
        """The first sign in the packets ``start`` to ``last``, inclusive."""
        at = bisect.bisect_left(self._numbers, start)
        return self._signs[at] if at < len(self._numbers) and self._numbers[at] <= last else None


class _Keys:
    """The key frames seen so far."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._times: list[int | None] = []
        self._are_whole: list[bool] = []
        """Whether each is an intra frame, which needs no others.  A gradual refresh also starts at a "key frame"."""

    def add(self, number: int, time: int | None) -> None:
        self._numbers.append(number)
        self._times.append(time)
        self._are_whole.append(False)

    def show(self, number: int, frame: Any) -> None:
        """Record that the frame of packet ``number`` was decoded."""
        at = bisect.bisect_left(self._numbers, number)
        if at < len(self._numbers) and self._numbers[at] == number:
            self._are_whole[at] = frame.pict_type in (PictureType.I, PictureType.NONE)  # some codecs have no types

    def needed(self, number: int, time: int) -> int:
        """The first packet that the frame of packet ``number``, shown at ``time``, may depend on."""
        at = bisect.bisect_right(self._numbers, number) - 1
        if at >= 0 and (key_time := self._times[at]) is not None and time < key_time:
            at -= 1  # it is shown before its key frame, and may depend on earlier frames
        while at >= 0 and not self._are_whole[at]:
            at -= 1
        return self._numbers[at] if at >= 0 else 0


@contextmanager
def logged_errors() -> Iterator[list[str]]:
    """Collect the errors that FFmpeg logs in this block, except harmless ones.  The list is filled when it ends."""
    errors: list[str] = []
    logging.set_level(logging.ERROR)
    logging.set_skip_repeated(False)
    try:
        with logging.Capture(local=False) as messages:
            yield errors
    finally:
        logging.set_level(None)
    errors += [text.strip() for _, _, text in messages if not any(one in text for one in _HARMLESS)]
