"""Good and bad video files, all real."""

import importlib.util
import os
import platform
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from mm.data.media import video_decode, video_header
from mm.data.media.video_header import read_header
from mm.data.media.video_patches import Clock, wanted_frames
from mm.errors import UserError
from tests.data.clips import all_frames, changed_frames, even, kind_of_clip, read, write_clip

KINDS = {
    "clip.mp4": {}, "all-keys.mp4": {"gop": 1}, "one-key.mp4": {"gop": 1000}, "clip.mkv": {}, "clip.ts": {},
    "clip.webm": {"codec": "libvpx-vp9"}, "clip.avi": {"codec": "mpeg4", "time_base": Fraction(1, 30)},
    "motion.avi": {"codec": "mjpeg", "time_base": Fraction(1, 30)}, "clip.mov": {"codec": "mpeg4"},
    "fragments.mp4": {"options": {"movflags": "frag_keyframe+empty_moov"}},
    "changing.mp4": {"ticks": [0, 7, 9, 40, 41, 300, 310, 1000, 1900]},
    "changing.mkv": {"ticks": [0, 7, 9, 40, 41, 300, 310, 1000, 1900]},
    "late.mp4": {"ticks": [tick + 900 for tick in even(30)]},
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_any_frames_of_any_kind_of_file_are_those_of_reading_it_from_the_beginning(tmp_path, name):
    path = kind_of_clip(tmp_path / name, **KINDS[name])
    frames, times = all_frames(path)
    header = read_header(str(path), True)
    assert [time * header.time_base for time in header.times.tolist()] == times
    assert (header.height, header.width) == frames[0].shape[:2] and header.is_exact
    last = len(frames) - 1
    for numbers in (range(len(frames)), [0, last], [last], sorted({1, 2, 7, last - 1})):
        found = read(path, numbers)
        assert all(np.array_equal(one, frames[n]) for one, n in zip(found, numbers, strict=True))


@pytest.mark.parametrize(("rotation", "turn"), [(90, 1), (180, 2), (270, 3), (-90, 3)])
def test_frames_are_turned_upright(tmp_path, rotation, turn):
    path = write_clip(tmp_path / "turned.mp4", even(5), rotation=rotation)
    expected = all_frames(path, turn)[0]
    header = read_header(str(path), True)
    assert (header.height, header.width) == expected[0].shape[:2]
    assert all(map(np.array_equal, read(path), expected))
    assert all(map(np.array_equal, read(path, is_upright=False), all_frames(path)[0]))


# Row 47: long and large videos


def test_a_few_frames_of_a_long_video_are_found_by_its_key_frames(tmp_path):
    """Four hours: decoding from the beginning would encounter damage between the selected frames."""
    path = write_clip(tmp_path / "long.mp4", [600 * 8 * n for n in range(1800)], size=(32, 32), gop=6)
    header = read_header(str(path), True)
    assert float(Clock.of(header, None, None).seconds) == 4 * 3600
    assert len(header.key_times) >= 300
    whole = read(path, [0, 900, 1799])
    with changed_frames(path) as frames:
        for frame in frames[100:800]:
            frame[5:] = bytes(len(frame) - 5)
    assert all(map(np.array_equal, read(path, [0, 900, 1799]), whole))


def test_frames_beyond_the_cap_are_refused_before_they_are_decoded(tmp_path):
    path = write_clip(tmp_path / "large.avi", [0], size=(7200, 7200), codec="mjpeg", time_base=Fraction(1, 30))
    with pytest.raises(UserError, match=r"large.avi: has 7200 x 7200 pixels per frame, above 50000000; make it"):
        read_header(str(path), True)


def test_a_file_too_large_to_be_scanned_is_known_by_its_index(tmp_path, monkeypatch):
    path = str(write_clip(tmp_path / "large.mp4", even(90), gop=7))
    scanned = read_header(path, True)
    monkeypatch.setattr(video_header, "MAX_SCANNED_BYTES", 100)
    header = read_header(path, True)
    assert not header.is_exact and len(header.key_times) >= 10
    assert np.array_equal(header.times, scanned.times)
    numbers = np.array([0, 3, 44, 88, 89])
    found = video_decode.frames_of(path, wanted_frames(Clock.of(header, None, None), numbers, True), "pyav")
    assert all(map(np.array_equal, found, read(path, numbers)))
    cut(Path(path), 0.9)
    with pytest.raises(UserError, match=r"large.mp4: is "):
        read_header(path, True)


# Row 42: damaged files


def cut(path, share):
    path.write_bytes(path.read_bytes()[: int(len(path.read_bytes()) * share)])
    return path


@pytest.mark.parametrize(("name", "settings"), [
    ("short.mp4", {"options": {"movflags": "faststart"}}), ("short.mkv", {}), ("short.webm", {"codec": "libvpx-vp9"}),
    ("short.avi", {"codec": "mpeg4", "ticks": range(60), "time_base": Fraction(1, 30)}),
])  # fmt: skip
def test_a_truncated_file_is_refused(tmp_path, name, settings):
    path = kind_of_clip(tmp_path / name, **{"ticks": even(60, 10), **settings})
    read(path)
    cut(path, 0.5)
    with pytest.raises(UserError, match=f"{name}: .*truncated"):
        read_header(str(path), True)


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.mp4")
    for path in (tmp_path / "pipe.mp4", tmp_path, Path("/dev/zero")):
        with pytest.raises(UserError, match=f"{path}: is not a regular file; expected a video"):
            read_header(str(path), True)
    with pytest.raises(UserError, match=r"absent.mp4: cannot be read: No such file"):
        read_header(str(tmp_path / "absent.mp4"), True)


def test_audio_alone_is_not_a_video(tmp_path):
    """Row 43."""
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16_000)
        for _ in range(20):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate = 16_000
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(UserError, match=r"sound.mp4: has no video stream; remove the sample"):
        read_header(str(path), True)


def test_a_file_whose_rate_is_wrong_is_read_by_its_times(tmp_path):
    """Row 45: its header states 30 frames per second, but its frames are half a second apart."""
    path = write_clip(tmp_path / "wrong.mkv", [300 * n for n in range(10)])
    header = read_header(str(path), True)
    assert Clock.of(header, None, None).seconds == 5


# Backends

NOT_ALL = ("clip.ts", "late.mp4", "fragments.mp4")
"""Files that decord or torchcodec refuses, or gives other times."""

no_decord = pytest.mark.skipif(platform.machine() != "x86_64", reason="decord has a wheel for x86_64 only")
no_torchcodec = pytest.mark.skipif(
    importlib.util.find_spec("torchcodec") is None,
    reason="torchcodec needs FFmpeg's libraries of the system and torch's CUDA build: pip install torchcodec")


@pytest.mark.parametrize("other", [
    pytest.param("decord", marks=no_decord), pytest.param("torchcodec", marks=no_torchcodec)])
@pytest.mark.parametrize("name", [name for name in KINDS if name not in NOT_ALL])
def test_every_backend_gives_the_frames_of_pyav(other, tmp_path, name):
    path = kind_of_clip(tmp_path / name, **KINDS[name])
    last = len(all_frames(path)[0]) - 1
    for numbers in (range(last + 1), [1, last // 2, last]):
        assert all(map(np.array_equal, read(path, numbers, backend=other), read(path, numbers)))


def test_a_backend_that_cannot_be_imported_is_reported(tmp_path, monkeypatch):
    (tmp_path / "torchcodec.py").write_text("raise ModuleNotFoundError('no torchcodec here')")
    monkeypatch.syspath_prepend(tmp_path)
    why = video_decode.missing_backend("torchcodec")
    assert why == "ModuleNotFoundError: no torchcodec here"


@no_decord
def test_files_that_decord_rotates_wrongly_are_refused(tmp_path):
    path = write_clip(tmp_path / "turned.mp4", even(5), rotation=90)
    with pytest.raises(UserError, match=r"turned.mp4: is rotated by its metadata, which decord gets wrong; set video"):
        read(path, backend="decord")
