"""Which frames of a video the model sees, and at what size: arithmetic on times and sizes.

Two rules, as for images: that of qwen-vl-utils, which was published with Qwen2.5-VL and which transformers relies on,
and LLaMA-Factory's, which MindSpeed-MM uses.  Both work with frame numbers at a constant rate.  Here a number stands
for the time at which that frame would start, so a video with a variable frame rate is sampled evenly in time.  Only
LLaMA-Factory's rule counts frames regardless of their times, because its users expect the frames that it takes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from mm.data.media.video_header import VideoHeader, Wanted

FRAME_FACTOR = 2
"""qwen-vl-utils takes a multiple of this many frames."""
VL_UTILS_FRAME_PIXELS = 768 * 28 * 28
"""Upper limit of pixels per frame in qwen-vl-utils; users can only lower it."""


@dataclass(frozen=True)
class FrameRule:
    """How many frames to take; from the data JSON, or from the video's own settings."""

    fps: float
    """Frames per second; ignored if ``num_frames`` is set."""
    num_frames: int | None
    min_frames: int
    max_frames: int


@dataclass(frozen=True)
class Clock:
    """The selected time range of a video, and its frames at even steps.  Times are in units of ``time_base``."""

    header: VideoHeader
    first: int
    """Index of the first frame in the range; ``last`` likewise."""
    last: int
    step: Fraction
    """Average time from one frame of the range to the next."""

    @classmethod
    def of(cls, header: VideoHeader, start_seconds: float | None, end_seconds: float | None) -> "Clock":
        """Raises ValueError when no frame starts between ``start_seconds`` and ``end_seconds``."""
        times, base = header.times, header.time_base
        length = int(times[-1] - times[0])
        mean, after = _steps(header)
        first = _first_at(header, start_seconds, 0)
        last = _first_at(header, end_seconds, len(times), is_after=True) - 1
        if first > last:
            raise ValueError(f"no frame starts between video_start = {start_seconds or 0:g} and video_end = "
                             f"{'its end' if end_seconds is None else f'{end_seconds:g}'}; its duration is "
                             f"{float((length + after) * base):.2f} s")
        is_whole = last - first + 1 == len(times)
        span = int(times[last] - times[first]) + (after if is_whole else mean)
        return cls(header, first, last, span / (last - first + 1))

    @property
    def num_frames(self) -> int:
        return self.last - self.first + 1

    @property
    def seconds(self) -> Fraction:
        """Duration of the range, to the end of its last frame."""
        return self.step * self.num_frames * self.header.time_base

    def shown(self, numbers: Sequence[int]) -> np.ndarray:
        """The indices of the frames on screen at the times that ``numbers`` would have at a constant rate."""
        begin, slack = int(self.header.times[self.first]), _slack(self.step)
        times = [begin + math.floor(self.step * (number - self.first) + slack) for number in numbers]
        return np.searchsorted(self.header.times, np.array(times, dtype=np.int64), "right") - 1


def _steps(header: VideoHeader) -> tuple[Fraction, Fraction]:
    """The average time from one frame to the next, and the duration of the last frame."""
    times, count, stated = header.times, len(header.times), Fraction(header.last_duration)
    mean = Fraction(int(times[-1] - times[0]), count - 1) if count > 1 else max(stated, Fraction(1))
    # The stated rate is used if all times agree with it: times are rounded, the rate is not.
    rates = (1 / (header.stated_rate * header.time_base), mean) if header.stated_rate else (mean,)
    for step in rates:
        if np.abs(times - times[0] - np.arange(count) * float(step)).max() <= 1:
            return step, step if count > 1 else mean
    # The stated duration of the last frame alone is often a guess.
    return mean, stated if mean <= 2 * stated <= 4 * mean else mean


def _slack(step: Fraction) -> Fraction:
    """How far a frame's time may be off, because files round times to their time base."""
    return min(Fraction(2), step / 4)


def _first_at(header: VideoHeader, seconds: float | None, default: int, is_after: bool = False) -> int:
    """Index of the first frame at or after ``seconds`` from the first one; ``is_after``: strictly after."""
    if seconds is None:
        return default
    times = header.times
    slack = _slack(Fraction(int(times[-1] - times[0]), max(len(times) - 1, 1)))
    ticks = Fraction(seconds) / header.time_base + (slack if is_after else -slack)
    return int(np.searchsorted(times - times[0], float(ticks), "right" if is_after else "left"))


def vl_utils_frames(clock: Clock, rule: FrameRule) -> np.ndarray:
    """Ascending indices of the frames that qwen-vl-utils takes (``smart_nframes``); may contain duplicates.

    qwen-vl-utils refuses videos with fewer frames than its minimum; here such a video gives all its frames.  Raises
    ValueError when ``rule.num_frames`` is more than the video has.
    """
    total, factor = clock.num_frames, FRAME_FACTOR
    if rule.num_frames is not None:
        count = round(rule.num_frames / factor) * factor
        if count > total:
            raise ValueError(f"nframes = {rule.num_frames}, but the video has {total} frames; ask for {total} at most")
    else:
        least = math.ceil(rule.min_frames / factor) * factor
        most = math.floor(min(rule.max_frames, total) / factor) * factor
        count = math.floor(min(max(float(clock.seconds) * rule.fps, least), most) / factor) * factor
    numbers = torch.linspace(clock.first, clock.last, max(count, 1)).round().long().tolist()
    return clock.shown(numbers)


def llama_factory_frames(clock: Clock, rule: FrameRule) -> np.ndarray:
    """Ascending indices of the frames that LLaMA-Factory takes (``_get_video_sample_indices``).

    Raises ValueError when ``rule.num_frames`` is more than the video has.
    """
    count = max(rule.min_frames, math.floor(float(llama_factory_seconds(clock)) * rule.fps))
    count = min(clock.num_frames, rule.max_frames, count) if rule.num_frames is None else max(rule.num_frames, 1)
    if count > clock.num_frames:
        raise ValueError(f"nframes = {count}, but the video has {clock.num_frames} frames; ask for as many at most")
    return np.linspace(clock.first, clock.last, count).astype(np.int32)


def llama_factory_seconds(clock: Clock) -> Fraction:
    """The duration that LLaMA-Factory uses: the file's stated one, if it has one and the whole video is selected."""
    header = clock.header
    is_whole = clock.num_frames == len(header.times)
    return header.stated_duration * header.time_base if is_whole and header.stated_duration else clock.seconds


def wanted_frames(clock: Clock, numbers: np.ndarray, is_upright: bool) -> Wanted:
    """What a decoder needs to know to find these frames."""
    header = clock.header
    numbers = np.unique(numbers)
    times = header.times[numbers]
    keys = np.maximum(np.searchsorted(header.key_times, times, "right") - 1, 0)
    reach = math.floor(_slack(clock.step)) if header.is_exact else int(header.times[-1] - header.times[0]) + 1
    return Wanted(
        numbers=tuple(numbers.tolist()),
        times=tuple(times.tolist()),
        starts=tuple(header.key_times[keys].tolist()),
        seeks=tuple(header.key_seeks[keys].tolist()),
        earlier_seeks=tuple(header.key_seeks[np.maximum(keys - 1, 0)].tolist()),
        reach=reach,
        time_base=header.time_base,
        is_upright=is_upright,
    )


def most_frame_pixels(max_pixels: int, min_pixels: int, total_pixels: int, num_frames: int) -> int:
    """The most pixels per frame by qwen-vl-utils' rule, for a video of ``num_frames`` (its ``fetch_video``).

    An even share of ``total_pixels``, where two frames count as one, but at least 5% above ``min_pixels``.
    """
    share = max(min(VL_UTILS_FRAME_PIXELS, total_pixels / num_frames * FRAME_FACTOR), int(min_pixels * 1.05))
    return min(max_pixels, int(share))
