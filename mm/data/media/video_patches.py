"""Videos as the patches that the ViT reads: which frames, at what size, resized and cut in pairs.

Bit-identical to transformers' ``Qwen2VLVideoProcessor``, which needs torchvision and keeps all frames in memory.  The
rule of qwen-vl-utils, on which transformers relies, chooses frames, or LLaMA-Factory's, which MindSpeed-MM uses.
Both number frames at a constant rate.  Here a number stands for the time at which that frame would start, so a video
with a variable frame rate is sampled evenly in time.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from mm.batch import Grid, Normalisation
from mm.config.data import DataConfig
from mm.data.media.image_decode import image_size, load_image
from mm.data.media.image_patches import ImageProcessor, ResizeStep, llama_factory_steps, smart_resize
from mm.data.media.video_decode import animation_header, frames_of, is_animation, missing_backend
from mm.data.media.video_header import Pixels, VideoHeader, Wanted, read_header
from mm.data.sample import Inline, Video
from mm.data.workers import decoding
from mm.errors import UserError

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
    """Ascending indices of the frames that qwen-vl-utils takes (``smart_nframes``), perhaps with duplicates.

    A video with fewer frames than its minimum, which it refuses, gives all frames.  Raises ValueError when
    ``rule.num_frames`` is more than the video has.
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
    """The most pixels per frame in qwen-vl-utils' ``fetch_video``: an even share of ``total_pixels``, where two frames
    count as one, but at least 5% above ``min_pixels``."""
    share = max(min(VL_UTILS_FRAME_PIXELS, total_pixels / num_frames * FRAME_FACTOR), int(min_pixels * 1.05))
    return min(max_pixels, int(share))


_Chosen = tuple[tuple[int, int], np.ndarray, Fraction, Wanted]
"""Width and height; frame indices, the duration that they cover, and what a decoder needs to find them."""
MAX_VIDEO_PIXELS = 1 << 28
"""Limit for all resized frames of a video together: 768 MiB.  Decoded frames are in memory one at a time."""


class VideoConstantsError(UserError):
    """A video cannot be read because the checkpoint lacks its settings: not the sample's fault."""


@dataclass(frozen=True)
class VideoPlan:
    """How one video will be read; only its first frame has been decoded so far."""

    path: str | tuple[str | Inline, ...]
    """As in ``Video``."""
    grid: Grid
    """Pairs of frames, and the patches of one frame."""
    seconds: float
    """Time from one pair of frames to the next."""
    wanted: Wanted
    repeats: tuple[int, ...]
    """How many times in a row each wanted frame is used."""
    steps: tuple[ResizeStep, ...]
    """Sizes to which each frame is resized before its final size."""


@dataclass(frozen=True)
class VideoProcessor:
    """Sizes, constants and settings for videos."""

    constants: ImageProcessor
    """The checkpoint's constants for videos."""
    data: DataConfig
    is_upright: bool
    """Whether to apply the rotation stored in the file."""
    missing: tuple[str, ...] = ()
    """Why the checkpoint does not say how to resize videos; ``constants`` are then those of images."""

    @property
    def backend(self) -> str:
        """The library that decodes video files."""
        return self.data.video_backend or "pyav"

    @classmethod
    def from_config(cls, data: DataConfig, images: ImageProcessor) -> "VideoProcessor":
        """Raises UserError when the backend is not installed, or the bounds of ``data`` contradict the checkpoint's.

        If the checkpoint's constants for videos are missing or wrong, planning a video raises VideoConstantsError.
        """
        if (why := missing_backend(data.video_backend or "pyav")) is not None:
            raise UserError(f"video_backend is {data.video_backend!r}, which cannot be imported ({why}); install it, "
                            f"or use \"pyav\".")
        try:
            constants = ImageProcessor.from_directory(data.model_name_or_path, media="video")
        except UserError as error:
            return cls(images, data, images.is_upright, error.problems)
        if not _is_llama_factory(data) and data.video_max_pixels < constants.min_pixels:
            raise UserError(
                f"video_max_pixels = {data.video_max_pixels} is below min_pixels = {constants.min_pixels} of the "
                f"checkpoint in {data.model_name_or_path}, which leaves no size; raise it.")
        return cls(constants, data, images.is_upright)

    def plan(self, video: Video) -> VideoPlan:
        """Select frames and size.  Raises UserError naming the file, also for extreme aspect ratios, and
        VideoConstantsError."""
        if self.missing:
            raise VideoConstantsError(f"{video.contents[0]} is a video, but {problem}" for problem in self.missing)
        name, is_listed = str(video.contents[0]), isinstance(video.path, tuple)
        try:
            first, numbers, length, wanted = self._listed(video) if is_listed else self._filed(video, name)
            pairing = self.constants.temporal_patch_size
            num_frames = -(-len(numbers) // pairing) * pairing
            steps = self._steps(video, *first)
            width, height = [first, *(size for size, _ in steps)][-1]
            height, width = self._last_size(video, height, width, num_frames)
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{name}: {error}; change its settings, crop or remove the video.") from error
        if num_frames * height * width > MAX_VIDEO_PIXELS:
            raise UserError(f"{name}: {num_frames} frames of {width} x {height} pixels exceed the limit of "
                            f"{MAX_VIDEO_PIXELS} pixels in total; lower video_max_pixels or "
                            f"{'list fewer frames' if is_listed else 'video_maxlen'}.")
        side = self.constants.patch_size
        repeats = np.unique(numbers, return_counts=True)[1]
        repeats[-1] += num_frames - len(numbers)  # repeat the last frame to complete the last pair
        return VideoPlan(
            video.path,
            grid=(num_frames // pairing, height // side, width // side),
            seconds=float(pairing * length / len(numbers)),
            wanted=wanted,
            repeats=tuple(repeats.tolist()),
            steps=tuple(steps),
        )

    def _filed(self, video: Video, path: str) -> _Chosen:
        """The frames of a video file to take.  Raises ValueError for settings that it does not fit."""
        with decoding(path, self.data.video_timeout):
            header = animation_header(path) if is_animation(path) else read_header(path, self.is_upright)
        clock, rule = Clock.of(header, video.video_start, video.video_end), self._rule(video)
        if _is_llama_factory(self.data):
            numbers, length = llama_factory_frames(clock, rule), llama_factory_seconds(clock)
        else:
            numbers, length = vl_utils_frames(clock, rule), clock.seconds
        return (header.width, header.height), numbers, length, wanted_frames(clock, numbers, self.is_upright)

    def _listed(self, video: Video) -> _Chosen:
        """The same for a list of frames, which are all used.  Raises UserError if their sizes differ."""
        sizes: list[tuple[int, int]] = []
        for path in video.contents:
            with decoding(path):
                sizes.append(size := image_size(path, self.is_upright))
            if size != sizes[0]:
                raise UserError(
                    f"{path}: has {size[0]} x {size[1]} pixels, but the first frame of its video, {video.contents[0]}, "
                    f"has {sizes[0][0]} x {sizes[0][1]}; save all frames in one size, or give them as images.")
        rate = Fraction(video.sample_fps or video.fps or self.data.video_fps).limit_denominator(1_000_000)
        numbers, zeros = tuple(range(len(sizes))), (0,) * len(sizes)
        wanted = Wanted(numbers, numbers, zeros, zeros, zeros, 0, 1 / rate, self.is_upright)
        return sizes[0], np.array(numbers), len(numbers) / rate, wanted

    def patches(self, plan: VideoPlan) -> Tensor:
        """The decoded, resized and cut frames, as ``ImageProcessor.to_patches`` returns them; raises UserError."""
        (pairs, rows, columns), pairing = plan.grid, self.constants.temporal_patch_size
        values = torch.empty(pairs, rows * columns, 3 * pairing * self.constants.patch_size**2, dtype=torch.uint8)
        frames = self._resized(plan)
        for pair in values:
            pixels = torch.stack([next(frames) for _ in range(pairing)]).permute(0, 2, 3, 1)
            pair.copy_(self.constants.to_patches(pixels)[0])
        assert next(frames, None) is None
        return values.view(-1, values.shape[-1])

    @property
    def normalisation(self) -> Normalisation:
        """Rounds like transformers: one subtraction and one division, by 255 times the checkpoint's constants."""
        mean, std = ((torch.tensor(one) * 255.0).tolist() for one in
                     (self.constants.image_mean, self.constants.image_std))
        return Normalisation(1.0, tuple(mean), tuple(std))

    def _resized(self, plan: VideoPlan) -> Iterator[Tensor]:
        """The frames of a plan in their final size, uint8 [3, height, width]."""
        size = [patches * self.constants.patch_size for patches in plan.grid[1:]]
        for frame, count in zip(self._decoded(plan), plan.repeats, strict=True):
            yield from [_resize(_stepped(frame, plan.steps), size)] * count

    def _decoded(self, plan: VideoPlan) -> Iterator[Pixels]:
        if isinstance(plan.path, str):
            with decoding(plan.path, self.data.video_timeout):
                yield from frames_of(plan.path, plan.wanted, self.backend)
            return
        for path in plan.path:
            with decoding(path):
                frame = load_image(path, self.is_upright)
            yield np.array(frame)

    def _rule(self, video: Video) -> FrameRule:
        if video.fps is not None and video.nframes is not None:
            raise ValueError("it has both fps and nframes; keep one of them")
        data, is_llama_factory = self.data, _is_llama_factory(self.data)
        most = video.max_frames or data.video_maxlen
        return FrameRule(
            fps=video.fps or data.video_fps,
            num_frames=video.nframes,
            min_frames=video.min_frames or (1 if is_llama_factory else min(data.video_min_frames, most)),
            max_frames=most,
        )

    def _bounds(self, video: Video) -> tuple[int, int]:
        """The least and most pixels per frame in the user's settings."""
        least = self.data.video_min_pixels if video.min_pixels is None else video.min_pixels
        return least, video.max_pixels or self.data.video_max_pixels

    def _steps(self, video: Video, width: int, height: int) -> list[ResizeStep]:
        return llama_factory_steps(width, height, *self._bounds(video)) if _is_llama_factory(self.data) else []

    def _last_size(self, video: Video, height: int, width: int, num_frames: int) -> tuple[int, int]:
        """Height and width in pixels.  Raises ValueError for extreme aspect ratios and contradictory bounds."""
        constants = self.constants
        lower, upper = constants.min_pixels, constants.max_pixels
        if not _is_llama_factory(self.data):
            least, most = self._bounds(video)
            lower = max(lower, least)
            upper = min(upper, most_frame_pixels(
                most, lower, video.total_pixels or self.data.video_total_pixels, num_frames))
        if lower > upper:
            raise ValueError(f"the pixel bounds of its frames contradict each other: at most {upper}, at least {lower}")
        return smart_resize(height, width, constants.patch_size * constants.merge_size, lower, upper)


def _is_llama_factory(data: DataConfig) -> bool:
    return data.image_resize == "llamafactory"


def _stepped(frame: Pixels, steps: tuple[ResizeStep, ...]) -> Pixels:
    """A frame after the resizing steps that LLaMA-Factory does with Pillow."""
    if not steps:
        return frame
    image = Image.fromarray(frame)
    for size, how in steps:
        image = image.resize(size, how)
    return np.array(image)


def _resize(frame: Pixels, size: list[int]) -> Tensor:
    """Resize to ``size`` (height, width): uint8 [3, height, width].  The same arithmetic as torchvision's."""
    pixels = torch.tensor(frame).permute(2, 0, 1)[None]
    if list(pixels.shape[2:]) == size:
        return pixels[0]
    return F.interpolate(pixels.contiguous(), size, mode="bicubic", antialias=True, align_corners=False)[0]
