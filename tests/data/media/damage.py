"""How much damage in the middle of a video is detected, per codec.

``python -m tests.data.media.damage`` prints the table.

Each try damages a part of a clip's packets, reads every fourth frame, and compares it with the undamaged clip's.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from mm.data.media.frames import Clock, wanted_frames
from mm.data.media.video_file import read_header
from mm.data.media.video_frames import pyav_frames
from mm.errors import UserError
from tests.data.clips import even, write_clip

_AT_30 = {"time_base": Fraction(1, 30)}
CLIPS: dict[str, tuple[str, dict[str, Any]]] = {
    "H.264": ("clip.mp4", {}),
    "MPEG-4": ("clip.avi", {"codec": "mpeg4", **_AT_30}),
    "MPEG-2": ("clip.ts", {"codec": "mpeg2video", **_AT_30}),
    "MJPEG": ("motion.avi", {"codec": "mjpeg", **_AT_30}),
    "AV1": ("av1.mp4", {"codec": "libsvtav1"}),
    "HEVC": ("hevc.mp4", {"codec": "libx265", "options": {"x265-params": "log-level=none"}}),
    "VP9": ("vp9.mp4", {"codec": "libvpx-vp9"}),
    "VP8": ("vp8.webm", {"codec": "libvpx"}),
    "HEVC in Matroska": ("hevc.mkv", {"codec": "libx265", "options": {"x265-params": "log-level=none"}}),
    "VP9 in Matroska": ("vp9.mkv", {"codec": "libvpx-vp9"}),
    "VP8 in Matroska": ("vp8.mkv", {"codec": "libvpx"}),
}


def _flip_bit(raw: bytearray, at: int, random: np.random.Generator) -> None:
    raw[at] ^= 1 << int(random.integers(8))


def _spoil(raw: bytearray, at: int, random: np.random.Generator) -> None:
    raw[at : at + 512] = random.bytes(512)


def _blank(raw: bytearray, at: int, random: np.random.Generator) -> None:
    raw[at : at + 4096] = bytes(4096)


def _drop(raw: bytearray, at: int, random: np.random.Generator) -> None:
    del raw[at // 188 * 188 : at // 188 * 188 + 188]


DAMAGES: dict[str, Callable[[bytearray, int, np.random.Generator], None]] = {
    "one bit": _flip_bit, "512 random bytes": _spoil, "4096 zeros": _blank, "188 bytes lost": _drop}


def tried(directory: Path, codec: str, num_tries: int) -> dict[str, Counter[str]]:
    """By damage, how many attempts were "refused", "harmless" (equal pixels) and "accepted" with different pixels."""
    file, settings = CLIPS[codec]
    path, broken = directory / file, directory / f"broken-{file}"
    write_clip(path, range(48) if "time_base" in settings else even(48), size=(160, 128), gop=12, bit_rate=600_000,
               **settings)
    whole, first, last, expected = path.read_bytes(), *_packets(path), dict(_read(path))
    found = {damage: Counter[str]() for damage in DAMAGES}
    for place, (damage, spoil) in enumerate(DAMAGES.items()):
        for number in range(num_tries):
            random = np.random.default_rng([number, place])
            raw = bytearray(whole)
            spoil(raw, int(random.integers(first, last)), random)
            broken.write_bytes(raw)
            try:
                is_same = all(np.array_equal(pixels, expected.get(time)) for time, pixels in _read(broken))
                found[damage]["harmless" if is_same else "accepted"] += 1
            except UserError:
                found[damage]["refused"] += 1
    return found


def _packets(path: Path) -> tuple[int, int]:
    """Offsets of packets near the beginning and near the end of the file."""
    with av.open(str(path)) as container:
        places = [packet.pos for packet in container.demux(video=0) if packet.size]
    return places[len(places) // 10], places[-len(places) // 10]


def _read(path: Path) -> list[tuple[float, np.ndarray]]:
    header = read_header(str(path), True)
    wanted = wanted_frames(Clock.of(header, None, None), np.arange(1, len(header.times), 4), True)
    return [(round(float(time * header.time_base), 3), pixels)
            for time, pixels in zip(wanted.times, pyav_frames(str(path), wanted), strict=True)]


def main(num_tries: int) -> None:
    print(f"| codec | {' | '.join(DAMAGES)} |\n|{' --- |' * (1 + len(DAMAGES))}")
    with tempfile.TemporaryDirectory() as directory:
        for codec in CLIPS:
            found = tried(Path(directory), codec, num_tries)
            cells = [f"{one['accepted']} of {num_tries - one['harmless']}" for one in found.values()]
            print(f"| {codec} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 25)
