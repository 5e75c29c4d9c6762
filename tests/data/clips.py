"""Video files for tests, and independent implementations of how published programs select and convert their frames."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from pathlib import Path

import av
import numpy as np
import torch

from mm.data.media.video_decode import BACKENDS
from mm.data.media.video_header import read_header
from mm.data.media.video_patches import Clock, wanted_frames
from tests.data.oracle import PREPROCESSOR, photo

TICK = Fraction(1, 600)
"""Time base of ``write_clip``."""
VFR = [0, 10, 20, 30, 40, 50, 60, 660, 1260, 1860, 1900, 1910]
"""Ticks of a changing frame rate: seven frames at once, then long still frames."""


@contextmanager
def same_scheduling() -> Iterator[None]:
    """Afterwards the thread is scheduled as before.

    As root, SVT-AV1 makes the thread that encodes with it a realtime one.  All processes that this one then starts
    would be realtime too, and a few that wait in a loop, as gloo does, would stop all others for ever.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def write_clip(
    path: Path, ticks: Sequence[int], size: tuple[int, int] = (96, 64), codec: str = "libx264", gop: int = 8,
    rotation: int = 0, time_base: Fraction = TICK, options: dict[str, str] | None = None, bit_rate: int = 4_000_000,
) -> Path:
    """A clip whose frame ``i`` is shown from ``ticks[i]`` on; a bar moves with the number of the frame.

    Encoded by one thread: the file depends on the number of threads.
    """
    container_options = {key: value for key, value in (options or {}).items() if key == "movflags"}
    with same_scheduling(), av.open(str(path), "w", options=container_options) as container:
        stream = container.add_stream(codec, rate=30)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.time_base = stream.codec_context.time_base = time_base
        stream.codec_context.thread_count = 1
        stream.codec_context.gop_size, stream.codec_context.bit_rate = gop, bit_rate
        stream.options = {key: value for key, value in (options or {}).items() if key != "movflags"}
        if rotation:
            stream.set_display_rotation(rotation)
        for number, tick in enumerate(ticks):
            frame = av.VideoFrame.from_ndarray(picture(number, size), format="rgb24")
            frame.pts, frame.time_base = tick, time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@contextmanager
def changed_frames(path: Path) -> Iterator[list[memoryview]]:
    """The bytes of every frame in storage order, which are written back."""
    with av.open(str(path)) as container:
        places = [(entry.pos, entry.size) for entry in container.streams.video[0].index_entries]
    raw = bytearray(path.read_bytes())
    yield [memoryview(raw)[start : start + size] for start, size in places]
    path.write_bytes(raw)


def damage_frame(path: Path, number: int) -> None:
    """Write zeros over the content of one frame, counted in storage order."""
    with changed_frames(path) as frames:
        frames[number][4:] = bytes(len(frames[number]) - 4)


def kind_of_clip(path: Path, num_frames: int = 40, **settings) -> Path:
    """A clip by settings of ``write_clip`` with so many frames, at 30 a second, if they have no ticks of their own."""
    ticks = settings.pop("ticks", range(num_frames) if "time_base" in settings else even(num_frames))
    return write_clip(path, ticks, **settings)


def picture(number: int, size: tuple[int, int]) -> np.ndarray:
    """Frame ``number`` of a clip."""
    pixels = _background(number % 5, size).copy()
    at = number * 4 % size[0]
    pixels[size[1] // 2 :, at : at + 4] = 255
    pixels[:8, :16] = (255, 0, 0)  # tells how the picture is turned
    return pixels


@cache
def _background(seed: int, size: tuple[int, int]) -> np.ndarray:
    return np.full((size[1], size[0], 3), 90, np.uint8) if max(size) > 1000 else np.array(photo(*size, seed=seed))


def even(num_frames: int, fps: int = 30) -> list[int]:
    """Ticks of a clip at a constant rate."""
    return [int(number / (fps * TICK)) for number in range(num_frames)]


def all_frames(path: Path | str, turn: int = 0) -> tuple[list[np.ndarray], list[Fraction]]:
    """Every frame, rotated counterclockwise by multiples of 90 degrees, with its time in seconds."""
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
        base = container.streams.video[0].time_base
        return [np.rot90(frame.to_ndarray(format="rgb24"), turn) for frame in frames], [f.pts * base for f in frames]


def qwen_numbers(
    total: int, fps: float, wanted_fps: float = 2.0, nframes: int | None = None, min_frames: int = 4,
    max_frames: int = 768, start: float | None = None, end: float | None = None,
) -> tuple[list[int], float]:
    """Numbers of the frames that qwen-vl-utils 0.0.14 takes of a constant-rate video, and the resulting frame rate.

    Its ``calculate_video_frame_range`` and ``smart_nframes``; it refuses a video of one frame, which here gives that
    frame.
    """
    first = 0 if start is None else math.ceil(max(0.0, min(start, total / fps)) * fps)
    last = total - 1 if end is None else min(math.floor(max(0.0, min(end, total / fps)) * fps), total - 1)
    total = last - first + 1
    if nframes is not None:
        count = round(nframes / 2) * 2
    else:
        least, most = math.ceil(min_frames / 2) * 2, math.floor(min(max_frames, total) / 2) * 2
        count = math.floor(min(min(max(total / fps * wanted_fps, least), most), total) / 2) * 2
    count = max(count, 1)
    return torch.linspace(first, last, count).round().long().tolist(), count / total * fps


def llama_factory_numbers(total: int, seconds: float, fps: float = 2.0, maxlen: int = 128) -> tuple[list[int], float]:
    """The same for LLaMA-Factory: ``_get_video_sample_indices`` and ``_regularize_videos`` of its data/mm_plugin.py."""
    count = min(total, maxlen, max(1, math.floor(seconds * fps)))
    return np.linspace(0, total - 1, count).astype(np.int32).tolist(), count / seconds


def patches(frames: list[np.ndarray], grid: tuple[int, int, int]) -> torch.Tensor:
    """Pixel values of frames in their final size, one patch after another."""
    frames = frames + frames[-1:] * (len(frames) % 2)
    pixels = torch.tensor(np.stack(frames)).permute(0, 3, 1, 2).float()
    mean, std = (torch.tensor(PREPROCESSOR[name]).view(3, 1, 1) * 255 for name in ("image_mean", "image_std"))
    pixels = (pixels - mean) / std
    rows = []
    for pair in range(grid[0]):
        for unit_row in range(grid[1] // 2):
            for unit_column in range(grid[2] // 2):
                for row in (2 * unit_row, 2 * unit_row + 1):
                    for column in (2 * unit_column, 2 * unit_column + 1):
                        part = pixels[2 * pair : 2 * pair + 2, :, 14 * row : 14 * row + 14, 14 * column :][..., :14]
                        rows.append(part.transpose(0, 1).flatten())
    return torch.stack(rows)


def read(
    path: Path, numbers: Sequence[int] | None = None, is_upright: bool = True, backend: str = "pyav"
) -> list[np.ndarray]:
    """Frames of a file, all by default."""
    header = read_header(str(path), is_upright)
    chosen = np.arange(len(header.times)) if numbers is None else np.array(numbers)
    return list(BACKENDS[backend](str(path), wanted_frames(Clock.of(header, None, None), chosen, is_upright)))
