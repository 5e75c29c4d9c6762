"""Which frames of a video are taken, compared with independent versions of qwen-vl-utils' and LLaMA-Factory's rules."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.data.media.video_header import VideoHeader
from mm.data.media.video_patches import Clock, FrameRule, llama_factory_frames, most_frame_pixels, vl_utils_frames
from tests.data.clips import llama_factory_numbers, qwen_numbers

RATES = (Fraction(30), Fraction(25), Fraction(30000, 1001), Fraction(24000, 1001), Fraction(10), Fraction(1, 2))


def header(times, base=Fraction(1, 90_000), keys=(0,), last=0):
    times = np.array(times, dtype=np.int64)
    return VideoHeader(64, 48, base, times, times[list(keys)], times[list(keys)], last)


def even(num_frames, rate, base, first=0):
    """A clip at a constant rate, with rounded times as in files."""
    times = [first + round(number / rate / base) for number in range(num_frames + 1)]
    return header(times[:-1], base, last=times[-1] - times[-2])


def rule(fps=2.0, num_frames=None, min_frames=4, max_frames=768):
    return FrameRule(fps, num_frames, min_frames, max_frames)


clips = st.tuples(st.integers(1, 2000), st.sampled_from(RATES),
                  st.sampled_from((Fraction(1, 90_000), Fraction(1, 12_800), Fraction(1, 1000))), st.integers(0, 9000))


@given(clips, st.sampled_from((0.5, 1.0, 2.0, 4.0, 29.0)), st.integers(1, 8), st.integers(2, 300))
def test_a_video_at_an_even_rate_gives_the_frames_of_qwen_vl_utils(clip, fps, min_frames, max_frames):
    clock = Clock.of(even(*clip), None, None)
    # of the rate that the rounded times say, as of any file
    rate = float(1 / (clock.step * clock.header.time_base))
    expected, sampled = qwen_numbers(clip[0], rate, fps, None, min_frames, max_frames)
    numbers = vl_utils_frames(clock, rule(fps, None, min_frames, max_frames))
    assert numbers.tolist() == expected
    assert len(numbers) / float(clock.seconds) == pytest.approx(sampled, rel=1e-9)


@given(clips, st.integers(2, 64))
def test_a_number_of_frames_gives_those_of_qwen_vl_utils(clip, nframes):
    clock = Clock.of(even(*clip), None, None)
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
    clock = Clock.of(even(num_frames, Fraction(rate), Fraction(1, 90_000)), start, end)
    # its products of floats may miss a frame that begins exactly there; whole numbers do not
    total, first = clock.num_frames, round(start * rate)
    assert (clock.first, clock.last) == (first, min(round(end * rate), num_frames - 1))
    expected = [first + number for number in qwen_numbers(total, rate, 2.0)[0]]
    assert vl_utils_frames(clock, rule()).tolist() == expected
    assert clock.seconds == Fraction(total, rate)


@pytest.mark.parametrize(("start", "end"), [(5.0, None), (2.0, 1.0), (None, -1.0), (0.51, 0.59)])
def test_a_span_without_a_frame_is_refused(start, end):
    with pytest.raises(ValueError, match=r"no frame starts between video_start = .* its duration is 3.00 s"):
        Clock.of(even(30, Fraction(10), Fraction(1, 1000)), start, end)


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


@given(clips, st.sampled_from((0.3, 1.0, 2.0, 12.0)), st.integers(1, 128))
def test_llama_factorys_frames(clip, fps, maxlen):
    clock = Clock.of(even(*clip), None, None)
    expected, sampled = llama_factory_numbers(clip[0], float(clock.seconds), fps, maxlen)
    numbers = llama_factory_frames(clock, rule(fps, None, 1, maxlen))
    assert numbers.tolist() == expected
    assert len(numbers) / float(clock.seconds) == pytest.approx(sampled)


@pytest.mark.parametrize("choose", [vl_utils_frames, llama_factory_frames])
def test_one_frame_is_enough(choose):
    clock = Clock.of(header([4711], last=0), None, None)
    assert choose(clock, rule()).tolist() == [0]
    nine = Clock.of(even(9, Fraction(30), Fraction(1, 1000)), None, None)
    assert choose(nine, rule(num_frames=1)).tolist() == choose(nine, rule(num_frames=0)).tolist() == [0]


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**9), st.integers(1, 384).map(lambda n: 2 * n))
def test_most_pixels_of_a_frame_equal_qwen_vl_utils(max_pixels, min_pixels, total_pixels, num_frames):
    limit = max(min(768 * 28 * 28, total_pixels / num_frames * 2), int(min_pixels * 1.05))
    assert most_frame_pixels(max_pixels, min_pixels, total_pixels, num_frames) == int(min(max_pixels, limit))
