"""Samples with videos, from frame numbers to tensors, compared with transformers, qwen-vl-utils and LLaMA-Factory."""

import os
import subprocess
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PillowImage
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from mm.batch import IGNORE_INDEX, normalised
from mm.data.encode import SampleEncoder
from mm.data.media.video_header import VideoHeader
from mm.data.media.video_patches import Clock, FrameRule, llama_factory_frames, most_frame_pixels, vl_utils_frames
from mm.data.sample import Image, Sample, Turn, Video
from mm.errors import UserError
from tests import llama_factory
from tests.data.clips import VFR, all_frames, even, llama_factory_numbers, patches, qwen_numbers, write_clip
from tests.data.oracle import PREPROCESSOR, data_config, pixel_numbers

RATES = (Fraction(30), Fraction(25), Fraction(30000, 1001), Fraction(24000, 1001), Fraction(10), Fraction(1, 2))


def header(times, base=Fraction(1, 90_000), keys=(0,), last=0):
    times = np.array(times, dtype=np.int64)
    return VideoHeader(64, 48, base, times, times[list(keys)], times[list(keys)], last)


def even_header(num_frames, rate, base, first=0):
    """A clip at a constant rate, with rounded times as in files."""
    times = [first + round(number / rate / base) for number in range(num_frames + 1)]
    return header(times[:-1], base, last=times[-1] - times[-2])


def rule(fps=2.0, num_frames=None, min_frames=4, max_frames=768):
    return FrameRule(fps, num_frames, min_frames, max_frames)


drawn_clips = st.tuples(st.integers(1, 2000), st.sampled_from(RATES),
                  st.sampled_from((Fraction(1, 90_000), Fraction(1, 12_800), Fraction(1, 1000))), st.integers(0, 9000))


@given(drawn_clips, st.sampled_from((0.5, 1.0, 2.0, 4.0, 29.0)), st.integers(1, 8), st.integers(2, 300))
def test_a_video_at_an_even_rate_gives_the_frames_of_qwen_vl_utils(clip, fps, min_frames, max_frames):
    clock = Clock.of(even_header(*clip), None, None)
    # of the rate that the rounded times say, as of any file
    rate = float(1 / (clock.step * clock.header.time_base))
    expected, sampled = qwen_numbers(clip[0], rate, fps, None, min_frames, max_frames)
    numbers = vl_utils_frames(clock, rule(fps, None, min_frames, max_frames))
    assert numbers.tolist() == expected
    assert len(numbers) / float(clock.seconds) == pytest.approx(sampled, rel=1e-9)


@given(drawn_clips, st.integers(2, 64))
def test_a_number_of_frames_gives_those_of_qwen_vl_utils(clip, nframes):
    clock = Clock.of(even_header(*clip), None, None)
    if round(nframes / 2) * 2 > clip[0]:
        with pytest.raises(ValueError, match=f"nframes = {nframes}, but the video has {clip[0]} frames"):
            vl_utils_frames(clock, rule(num_frames=nframes))
        return
    assert vl_utils_frames(clock, rule(num_frames=nframes)).tolist() == qwen_numbers(clip[0], 30.0, nframes=nframes)[0]


@given(st.integers(2, 900), st.sampled_from((10, 25, 30)), st.data())
def test_a_span_gives_the_frames_of_qwen_vl_utils(num_frames, rate, data):
    seconds = [data.draw(st.integers(0, num_frames)) / rate for _ in range(2)]
    start, end = min(seconds), max(seconds)
    if start * rate > num_frames - 1:
        return
    clock = Clock.of(even_header(num_frames, Fraction(rate), Fraction(1, 90_000)), start, end)
    # its products of floats may miss a frame that begins exactly there; whole numbers do not
    total, first = clock.num_frames, round(start * rate)
    assert (clock.first, clock.last) == (first, min(round(end * rate), num_frames - 1))
    expected = [first + number for number in qwen_numbers(total, rate, 2.0)[0]]
    assert vl_utils_frames(clock, rule()).tolist() == expected
    assert clock.seconds == Fraction(total, rate)


@pytest.mark.parametrize(("start", "end"), [(5.0, None), (2.0, 1.0), (None, -1.0), (0.51, 0.59)])
def test_a_span_without_a_frame_is_refused(start, end):
    with pytest.raises(ValueError, match=r"no frame starts between video_start = .* its duration is 3.00 s"):
        Clock.of(even_header(30, Fraction(10), Fraction(1, 1000)), start, end)


def test_a_changing_rate_is_sampled_evenly_in_time():
    """Ten frames in the first second, then one per second: sampling by number would nearly skip the end."""
    times = [number * 100 for number in range(10)] + [1000 * second for second in range(1, 11)]
    clock = Clock.of(header(times, Fraction(1, 1000), last=1000), None, None)
    numbers = vl_utils_frames(clock, rule(fps=1.0))
    # 20 frames in 11 s are a step of 0.55 s; 10 of the numbers 0 to 19, evenly
    even_numbers = [0, 2, 4, 6, 8, 11, 13, 15, 17, 19]
    expected = [max(n for n, time in enumerate(times) if time <= 550 * number) for number in even_numbers]
    assert clock.seconds == 11 and numbers.tolist() == expected
    assert expected == [0, 10, 11, 12, 13, 15, 16, 17, 18, 19]


@given(drawn_clips, st.sampled_from((0.3, 1.0, 2.0, 12.0)), st.integers(1, 128))
def test_llama_factorys_frames(clip, fps, maxlen):
    clock = Clock.of(even_header(*clip), None, None)
    expected, sampled = llama_factory_numbers(clip[0], float(clock.seconds), fps, maxlen)
    numbers = llama_factory_frames(clock, rule(fps, None, 1, maxlen))
    assert numbers.tolist() == expected
    assert len(numbers) / float(clock.seconds) == pytest.approx(sampled)


@pytest.mark.parametrize("choose", [vl_utils_frames, llama_factory_frames])
def test_one_frame_is_enough(choose):
    clock = Clock.of(header([4711], last=0), None, None)
    assert choose(clock, rule()).tolist() == [0]
    nine = Clock.of(even_header(9, Fraction(30), Fraction(1, 1000)), None, None)
    assert choose(nine, rule(num_frames=1)).tolist() == choose(nine, rule(num_frames=0)).tolist() == [0]


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**9), st.integers(1, 384).map(lambda n: 2 * n))
def test_most_pixels_of_a_frame_equal_qwen_vl_utils(max_pixels, min_pixels, total_pixels, num_frames):
    limit = max(min(768 * 28 * 28, total_pixels / num_frames * 2), int(min_pixels * 1.05))
    assert most_frame_pixels(max_pixels, min_pixels, total_pixels, num_frames) == int(min(max_pixels, limit))


MAX_PIXELS = 96 * 96


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    write_clip(folder / "plain.mp4", even(75))  # 2.5 s
    write_clip(folder / "odd.mp4", even(45, 15))
    write_clip(folder / "large.mp4", even(40, 10), size=(200, 120))
    write_clip(folder / "changing.mp4", VFR)
    write_clip(folder / "turned.mp4", even(60), rotation=90)
    write_clip(folder / "one.mp4", even(1))
    write_clip(folder / "three.mp4", even(3))
    write_clip(folder / "plain.webm", even(60), codec="libvpx-vp9")
    write_clip(folder / "plain.mkv", even(60, 24))
    write_clip(folder / "plain.avi", range(60), codec="mpeg4", time_base=Fraction(1, 30))
    write_clip(folder / "plain.ts", even(60))
    return folder


@dataclass(frozen=True)
class Clip:
    """The video of a case, and its expected result."""

    name: str
    rate: float
    settings: dict
    numbers: tuple[int, ...] = ()
    """Frame times, if the published rule does not give them."""
    turn: int = 0


def clip(name, rate=30.0, numbers=(), turn=0, **settings):
    return Clip(name, rate, settings, numbers, turn)


CASES = {
    "plain": [["What? ", clip("plain.mp4")], "A bar."],
    "odd number of frames": [[clip("odd.mp4", 15.0)], "A bar."],
    "smaller": [[clip("large.mp4", 10.0), "?"], "A bar."],
    # 12 frames in 1910/600 s and a last one of the mean length, 174/600 s: 6 at 2 a second, of the even numbers
    # 0 2 4 7 9 11, which are at 0 347 695 1215 1563 1910
    "changing rate": [[clip("changing.mp4", 12 / (1910 / 600 * 12 / 11), (0, 6, 7, 7, 8, 11))], "A bar."],
    "turned": [[clip("turned.mp4", turn=1)], "It is turned."],
    "one frame": [[clip("one.mp4", numbers=(0,))], "Still."],
    "fewer frames than are taken at least": [[clip("three.mp4")], "Short."],
    "one frame of many": [[clip("plain.mp4", nframes=1)], "Still."],
    "two videos": [[clip("plain.mp4"), " or ", clip("turned.mp4", turn=1), "?"], "Both."],
    "picture, video, picture": [["wide.png", " ", clip("odd.mp4", 15.0), "and", "tall.jpg"], "Three."],
    "turns": [[clip("plain.mp4"), "What?"], "A bar.", ["And ", "wide.png", clip("odd.mp4", 15.0), "?"], "Another."],
    "webm": [[clip("plain.webm")], "A bar."],
    "mkv": [[clip("plain.mkv", 24.0)], "A bar."],
    "avi": [[clip("plain.avi")], "A bar."],
    "ts": [[clip("plain.ts")], "A bar."],
    "own rate": [[clip("plain.mp4", fps=8.0)], "A bar."],
    "own number": [[clip("plain.mp4", nframes=13)], "A bar."],
    "own bounds": [[clip("plain.mp4", fps=30.0, min_frames=3, max_frames=11)], "A bar."],
    "own span": [[clip("plain.mp4", video_start=0.4, video_end=1.7)], "A bar."],
    "own pixels": [[clip("large.mp4", 10.0, min_pixels=60_000, max_pixels=70_000)], "A bar."],
    "own pixels in all": [[clip("large.mp4", 10.0, total_pixels=20_000)], "A bar."],
}  # fmt: skip


def numbers_of(processor, plan):
    return normalised(processor.patches(plan), processor.normalisation.constants())


def parts_of(question, clips, media_directory):
    """One turn's parts as a sample has them."""
    for part in question:
        if isinstance(part, Clip):
            yield Video(str(clips / part.name), **part.settings)
        elif part.endswith((".png", ".jpg")):
            yield Image(str(media_directory / part))
        else:
            yield part


def sample_of(case, clips, media_directory):
    turns = [Turn("user", tuple(parts_of(said, clips, media_directory))) if isinstance(said, list)
             else Turn("assistant", (said,)) for said in case]
    return Sample(tuple(turns), "by hand:0")


RENAMED = {"fps": "wanted_fps", "nframes": "nframes", "min_frames": "min_frames", "max_frames": "max_frames",
           "video_start": "start", "video_end": "end"}  # fmt: skip


def expected_video(one, clips):
    """Grid, seconds of a pair of frames, and pixel values."""
    frames, _ = all_frames(clips / one.name, one.turn)
    settings = {RENAMED[name]: value for name, value in one.settings.items() if name in RENAMED}
    numbers, sampled = qwen_numbers(len(frames), one.rate, **settings)
    numbers = one.numbers or numbers
    frames = [frames[number] for number in numbers]
    num_frames = len(frames) + len(frames) % 2
    least = max(one.settings.get("min_pixels", 256), 3136)
    most = max(one.settings.get("total_pixels", 90_316_800) / num_frames * 2, int(least * 1.05))
    most = min(one.settings.get("max_pixels", MAX_PIXELS), int(most))
    height, width = smart_resize(*frames[0].shape[:2], factor=28, min_pixels=least, max_pixels=most)
    pixels = torch.tensor(np.stack(frames)).permute(0, 3, 1, 2)
    if (height, width) != frames[0].shape[:2]:  # in one call for all, as transformers does by torchvision
        pixels = torch.nn.functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
    grid = (num_frames // 2, height // 14, width // 14)
    return grid, 2 / sampled, patches(list(pixels.permute(0, 2, 3, 1).numpy()), grid)


@pytest.fixture(scope="module")
def encoder_of(hf_directory, media_directory, model_config):
    def build(**changes):
        data = data_config(hf_directory, media_directory, "unused", video_max_pixels=MAX_PIXELS, **changes)
        return SampleEncoder.from_config(data, model_config, 4096)

    return build


@pytest.fixture(scope="module")
def encoder(encoder_of):
    return encoder_of()


def messages_of(case):
    return [{"role": "assistant", "content": said} if isinstance(said, str) else {"role": "user", "content": [
        {"type": "video"} if isinstance(part, Clip) else
        {"type": "image"} if part.endswith((".png", ".jpg")) else {"type": "text", "text": part} for part in said
    ]} for said in case]


def expanded(tokenizer, messages, num_tokens, **options):
    """Token ids of the rendered conversation, with media tokens repeated as by transformers' processor."""
    text, counts = tokenizer.apply_chat_template(messages, tokenize=False, **options), iter(num_tokens)
    for name in ("image", "video"):
        text = text.replace(f"<|{name}_pad|>", f"<|{name}|>")
    pieces = text.split("<|vision_start|>")
    for number, piece in enumerate(pieces[1:], 1):
        name = piece[2:7]
        pieces[number] = piece.replace(f"<|{name}|>", f"<|{name}_pad|>" * next(counts), 1)
    return tokenizer("<|vision_start|>".join(pieces))["input_ids"]


def expected_labels(tokenizer, messages, num_tokens, token_ids):
    labels = [IGNORE_INDEX] * len(token_ids)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = expanded(tokenizer, messages[:number], num_tokens, add_generation_prompt=True)
            whole = expanded(tokenizer, messages[: number + 1], num_tokens)
            labels[len(prompt) : len(whole)] = whole[len(prompt) :]
    return [*labels[1:], IGNORE_INDEX]


@pytest.mark.parametrize("name", CASES)
def test_a_sample_with_videos_equals_transformers(name, clips, encoder, tokenizer, reference, media_directory,
                                                  model_config):
    case = CASES[name]
    encoded = encoder.encode(sample_of(case, clips, media_directory))
    grids, seconds, pixels = [], [], []
    for part in (part for said in case if isinstance(said, list) for part in said):
        if isinstance(part, Clip):
            grid, interval, values = expected_video(part, clips)
            seconds.append(interval)
        elif part.endswith((".png", ".jpg")):
            found = reference.processor([PillowImage.open(media_directory / part)], return_tensors="pt")
            grid, values = tuple(found["image_grid_thw"][0].tolist()), found["pixel_values"]
            seconds.append(None)
        else:
            continue
        grids.append(grid)
        pixels.append(values)
    assert encoded.image_grids == tuple(grids)
    num_tokens = [t * h * w // 4 for t, h, w in grids]
    token_ids = expanded(tokenizer, messages_of(case), num_tokens)
    assert encoded.token_ids.tolist() == token_ids
    assert encoded.labels.tolist() == expected_labels(tokenizer, messages_of(case), num_tokens, token_ids)
    assert torch.equal(encoded.positions, hf_positions(reference, model_config, token_ids, grids, seconds))
    assert torch.equal(pixel_numbers(encoded), torch.cat(pixels))


def hf_positions(reference, model_config, token_ids, grids, seconds):
    model, ids = reference._model, torch.tensor([token_ids])
    model.config.vision_config.tokens_per_second = model_config.vision.tokens_per_second
    images, videos = ([grid for grid, one in zip(grids, seconds, strict=True) if (one is None) == is_image]
                      for is_image in (True, False))
    types = (ids == model_config.image_token_id) + 2 * (ids == model_config.video_token_id)
    return model.get_rope_index(
        ids, types.int(), torch.tensor(images) if images else None, torch.tensor(videos) if videos else None,
        torch.tensor([one for one in seconds if one is not None]))[0][:, 0]


@pytest.mark.parametrize("name", ["plain.mp4", "odd.mp4", "large.mp4", "one.mp4"])
def test_llama_factorys_rule(name, clips, encoder_of):
    """It counts frames, resizes them with Pillow to its own bounds, and repeats the last one of an odd number."""
    encoder = encoder_of(image_resize="llamafactory", video_min_pixels=2000, video_maxlen=5, video_fps=3.0)
    with av.open(str(clips / name)) as container:
        stream = container.streams.video[0]
        numbers, sampled = llama_factory_numbers(stream.frames, float(stream.duration * stream.time_base), 3.0, 5)
    frames = [llama_factory.preprocessed(PillowImage.fromarray(all_frames(clips / name)[0][number]), 2000, MAX_PIXELS)
              for number in numbers]
    frames += frames[-1:] * (len(frames) % 2)
    height, width = smart_resize(frames[0].height, frames[0].width, 28, 3136, 12_845_056)
    pixels = torch.tensor(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2)
    if tuple(pixels.shape[2:]) != (height, width):
        pixels = torch.nn.functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
    plan = encoder.videos.plan(Video(str(clips / name)))
    assert plan.grid == (len(frames) // 2, height // 14, width // 14)
    assert plan.seconds == pytest.approx(2 / sampled)
    expected = patches(list(pixels.permute(0, 2, 3, 1).numpy()), plan.grid)
    assert torch.equal(numbers_of(encoder.videos, plan), expected)


def test_llama_factorys_rule_turns_no_video_unless_asked(clips, encoder_of):
    video = Video(str(clips / "turned.mp4"))
    plans = [encoder_of(image_resize="llamafactory", image_exif=how).videos.plan(video) for how in (None, True)]
    assert [plan.grid[1] < plan.grid[2] for plan in plans] == [True, False]


def test_pixels_equal_transformers_video_processor(clips, encoder, tmp_path):
    """Through torchvision in a separate process, because transformers behaves differently when it is installed."""
    folder = Path(sys.prefix) / "torchvision"
    assert folder.is_dir(), "make puts torchvision beside the packages: remove .venv/.ready, and run make again"
    plans = [encoder.videos.plan(Video(str(clips / name))) for name in ("large.mp4", "odd.mp4")]
    videos = [torch.tensor(np.stack([all_frames(plan.path)[0][number] for number in plan.wanted.numbers]))
              for plan in plans]
    settings = {**{key: value for key, value in PREPROCESSOR.items() if not isinstance(value, str)},
                "max_pixels": MAX_PIXELS}  # fmt: skip
    torch.save({"videos": videos, "settings": settings}, tmp_path / "in.pt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(Path.cwd())))}
    subprocess.run([sys.executable, "-m", "tests.data.media.torchvision_oracle", tmp_path / "in.pt",
                    tmp_path / "out.pt"], check=True, env=environment, capture_output=True)
    for plan, expected in zip(plans, torch.load(tmp_path / "out.pt"), strict=True):
        assert expected["grid"].tolist() == [list(plan.grid)]
        assert torch.equal(numbers_of(encoder.videos, plan), expected["pixels"])


@pytest.mark.parametrize(("settings", "what"), [
    ({"min_pixels": 5000, "max_pixels": 4000}, "the pixel bounds of its frames contradict each other: at most 4"),
    ({"nframes": 100}, "nframes = 100, but the video has 75 frames; ask for 75 at most"),
    ({"nframes": 2, "fps": 2.0}, "it has both fps and nframes"),
    ({"video_start": 9.0}, "no frame starts between video_start = 9 and video_end = its end"),
])
def test_contradicting_settings_are_refused(clips, encoder, settings, what):
    with pytest.raises(UserError, match=f"plain.mp4: {what}"):
        encoder.videos.plan(Video(str(clips / "plain.mp4"), **settings))
