"""Frames of videos and animated images, equal to those of a whole decoding, and what damage says."""

import json
import platform
import re
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image as PillowImage

from mm.config.data import Attributes
from mm.data.encode import SampleEncoder
from mm.data.index.dataset import Dataset
from mm.data.index.index import Measure
from mm.data.media import video_decode
from mm.data.media.image_decode import load_image
from mm.data.media.video_decode import animation_header, frames_of
from mm.data.media.video_header import read_header
from mm.data.media.video_patches import Clock, wanted_frames
from mm.data.records.formats import read_sample
from mm.data.records.roots import MediaRoots
from mm.data.sample import Sample, Turn, Video
from mm.errors import UserError
from tests.data.clips import all_frames, changed_frames, damage_frame, even, kind_of_clip, patches, read, write_clip
from tests.data.oracle import data_config, photo


def noisy(path, **settings):
    """A clip with enough bytes to be damaged."""
    return write_clip(path, even(60), size=(160, 128), **settings)


def test_damage_lasts_until_the_next_key_frame(tmp_path):
    """Each frame alone equals that of the whole file, or is refused; frames of other groups of pictures are read."""
    path = noisy(tmp_path / "damaged.mp4")
    whole, _ = all_frames(path)
    damage_frame(path, 33)
    refused = set()
    for number in range(60):
        try:
            assert np.array_equal(read(path, [number])[0], whole[number])
        except UserError as error:
            refused.add(number)
            assert re.search(r"the frame at 1\.\d\d s is (missing|damaged \(.*\)); replace, re-encode", str(error))
    assert refused and refused <= set(range(32, 40))


def test_checksums_of_pictures_in_the_stream_are_compared(tmp_path):
    path = noisy(tmp_path / "sums.mp4", codec="libx265", options={"x265-params": "log-level=none:hash=1"})
    read(path)
    with changed_frames(path) as frames:
        frames[10][len(frames[10]) // 2] ^= 4
    with pytest.raises(UserError, match=r"sums.mp4: the frame at 0.\d\d s is damaged \(Invalid data"):
        read(path)


OPEN = "bframes=4:keyint=8:min-keyint=8:scenecut=0:open-gop=1"
GOOD = {
    "open.mp4": {"options": {"x264-params": f"{OPEN}:b-pyramid=normal:ref=4"}},
    "open.ts": {"options": {"x264-params": f"{OPEN}:b-pyramid=normal:ref=4"}},
    "refresh.mp4": {"options": {"x264-params": "intra-refresh=1:keyint=8"}},
    "open-hevc.mkv": {"codec": "libx265", "options": {"x265-params": f"{OPEN}:log-level=none"}},
    "open-hevc.ts": {"codec": "libx265", "options": {"x265-params": f"{OPEN}:log-level=none"}},
    "hidden.webm": {"codec": "libvpx-vp9", "options": {"auto-alt-ref": "1", "lag-in-frames": "16"}},
    "hidden8.webm": {"codec": "libvpx", "options": {"auto-alt-ref": "1", "lag-in-frames": "16"}},
    "av1.mkv": {"codec": "libsvtav1"},
    "old.mpg": {"codec": "mpeg2video", "time_base": Fraction(1, 30), "options": {"bf": "2"}},
    "old.ts": {"codec": "mpeg2video", "time_base": Fraction(1, 30), "options": {"bf": "2"}},
    "one-key.ts": {"gop": 1000},
    "two-keys.ts": {"gop": 24},
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_good_files_of_every_structure_are_read_from_any_frame(tmp_path, name):
    """Open groups of pictures, hidden frames, gradual refresh; and none is searched from the beginning."""
    path = str(kind_of_clip(tmp_path / name, **GOOD[name]))
    frames, times = all_frames(path)
    header = read_header(path, True)
    assert [time * header.time_base for time in header.times.tolist()] == times
    clock = Clock.of(header, None, None)
    for numbers in ([0], [39], [17], [9, 25], [2, 3, 30, 38], range(40)):
        found = video_decode.frames_of(path, wanted_frames(clock, np.array(numbers), True), "pyav")
        assert all(np.array_equal(one, frames[n]) for one, n in zip(found, numbers, strict=True))


@pytest.mark.parametrize("name", ["old.ts", "open.ts", "open.mp4", "open-hevc.mkv"])
def test_only_the_frames_that_a_wanted_one_needs_are_decoded(tmp_path, monkeypatch, name):
    """At most two groups of pictures of eight frames, and the frames until the decoder outputs the wanted one."""
    path, decoded = str(kind_of_clip(tmp_path / name, 160, **GOOD[name])), []
    frames_of = video_decode._Search._decoded
    monkeypatch.setattr(video_decode._Search, "_decoded",
                        lambda self: (decoded.append(one[0].pts) or one for one in frames_of(self)))
    header = read_header(path, True)
    wanted = wanted_frames(Clock.of(header, None, None), np.array([20, 150]), True)
    assert len(list(video_decode.frames_of(path, wanted, "pyav"))) == 2
    assert len(decoded) <= 2 * (8 + 16 + 2)


def test_a_stream_that_was_cut_between_key_frames_begins_with_the_first_one(tmp_path):
    """As in recorded broadcasts: the frames before it cannot be decoded, and are not counted."""
    path = write_clip(tmp_path / "cut.ts", even(60), gop=12, options={"x264-params": "scenecut=0"})
    whole, times = all_frames(path)
    with av.open(str(path)) as container:
        places = [packet.pos for packet in container.demux(video=0) if packet.size]
    path.write_bytes(path.read_bytes()[places[5] // 188 * 188 :])
    header = read_header(str(path), True)
    assert [time * header.time_base for time in header.times.tolist()] == times[12:]
    assert all(map(np.array_equal, read(path), whole[12:]))


def test_the_part_selected_by_an_edit_list_is_read(tmp_path):
    """It begins between two key frames."""
    source, path = write_clip(tmp_path / "whole.mp4", even(40), gop=12), tmp_path / "part.mp4"
    with av.open(str(source)) as original, av.open(str(path), "w") as container:
        stream = container.add_stream_from_template(original.streams.video[0])
        for packet in original.demux(video=0):
            if packet.size:
                shift = 5 * 1024 // 2  # in its time base, 5 frames
                packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, stream
                container.mux(packet)
    frames, _ = all_frames(path)
    assert len(frames) < 40
    assert all(map(np.array_equal, read(path), frames))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="decord has a wheel for x86_64 only")
def test_decord_alone_decodes_what_it_is_asked_for(tmp_path):
    """PyAV, which would refuse the damaged frame, does not decode it too."""
    path = noisy(tmp_path / "damaged.mp4")
    with changed_frames(path) as frames:
        frames[33][200:300] = bytes(range(100))
    assert len(read(path, backend="decord")) == 60


SIZE = (112, 84)
MILLISECONDS = [500, 500, 250, 250, 1000, 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Animations of six frames with four colour modes, and the same frames as files."""
    folder = tmp_path_factory.mktemp("animations")
    frames = [photo(*SIZE, seed=seed) for seed in range(6)]
    for number, frame in enumerate(frames):
        frame.save(folder / f"{number}.png")
    for name, more in (("moving.gif", {}), ("moving.webp", {"lossless": True}), ("moving.png", {}),
                       ("hidden.png", {"default_image": True})):
        durations = MILLISECONDS[1:] if name == "hidden.png" else MILLISECONDS
        frames[0].save(folder / name, save_all=True, append_images=frames[1:], duration=durations, **more)
    frames[0].save(folder / "even.png", save_all=True, append_images=frames[1:], duration=500)
    photo(*SIZE[::-1]).save(folder / "other.png")
    return folder


@pytest.fixture(scope="module")
def encoder(hf_directory, media_directory, model_config):
    data = data_config(hf_directory, media_directory, "unused", video_max_pixels=56 * 56)
    return SampleEncoder.from_config(data, model_config, 4096)


def sample_of(video):
    return Sample((Turn("user", ("What? ", video)), Turn("assistant", ("A digit.",))), "by hand:0")


@pytest.mark.parametrize("name", ["moving.gif", "moving.webp", "moving.png", "hidden.png"])
def test_an_animation_is_a_video_with_its_own_times(folder, name):
    path = str(folder / name)
    header = animation_header(path)
    durations = MILLISECONDS[1:] if name == "hidden.png" else MILLISECONDS
    assert (header.width, header.height, header.time_base) == (*SIZE, Fraction(1, 1000))
    assert header.times.tolist() == [0, *np.cumsum(durations[:-1]).tolist()]
    assert header.stated_duration == sum(durations) and header.last_duration == durations[-1]
    clock = Clock.of(header, None, None)
    found = list(frames_of(path, wanted_frames(clock, np.array([0, 2, 4]), True), "pyav"))
    with PillowImage.open(path) as image:
        for pixels, number in zip(found, (0, 2, 4), strict=True):
            image.seek(number + (name == "hidden.png"))
            assert np.array_equal(pixels, np.array(image.convert("RGB")))


def test_transparent_parts_of_a_gif_are_white_and_frames_without_a_time_last_a_tenth_of_a_second(tmp_path):
    """As FFmpeg decodes it."""
    frames = [PillowImage.new("RGBA", (40, 40), (0, 0, 0, 0)) for _ in range(2)]
    for number, frame in enumerate(frames):
        frame.paste((200, 0, 0, 255), (number * 20, 0, number * 20 + 20, 40))
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=0, disposal=2)
    header = animation_header(str(tmp_path / "a.gif"))
    assert header.times.tolist() == [0, 100]
    wanted = wanted_frames(Clock.of(header, None, None), np.array([1]), True)
    (pixels,) = frames_of(str(tmp_path / "a.gif"), wanted, "pyav")
    assert pixels[0, 0].tolist() == [255, 255, 255] and pixels[0, 30].tolist() == [200, 0, 0]


def test_an_animation_and_the_list_of_its_frames_are_the_same_sample(folder, encoder):
    """Half a second per frame, so at two frames per second both take all frames."""
    frames = tuple(str(folder / f"{number}.png") for number in range(6))
    listed, whole = (encoder.encode(sample_of(Video(path, fps=2.0))) for path in (frames, str(folder / "even.png")))
    assert listed.image_grids == whole.image_grids == ((3, 2, 4),)
    for name in ("token_ids", "labels", "positions", "pixel_values"):
        assert torch.equal(getattr(listed, name), getattr(whole, name))
    pixels = torch.tensor(np.stack([np.array(load_image(path)) for path in frames])).permute(0, 3, 1, 2)
    pixels = torch.nn.functional.interpolate(pixels, (28, 56), mode="bicubic", antialias=True)
    expected = patches(list(pixels.permute(0, 2, 3, 1).numpy()), (3, 2, 4))
    norm = encoder.videos.normalisation
    mean, std = (torch.tensor(one).repeat_interleave(2 * 14 * 14) for one in (norm.mean, norm.std))
    assert torch.equal((listed.pixel_values.float() - mean) / std, expected)


@pytest.mark.parametrize(("settings", "seconds"), [({}, 1.0), ({"sample_fps": 4.0}, 0.5), ({"fps": 0.5}, 4.0),
                                                   ({"sample_fps": 1.0, "raw_fps": 24.0}, 2.0)])
def test_every_listed_frame_is_taken_at_its_rate(folder, encoder, settings, seconds):
    """The last frame completes an odd number, as in qwen-vl-utils and LLaMA-Factory."""
    plan = encoder.planned(Video(tuple(str(folder / f"{number}.png") for number in range(5)), **settings))
    assert (plan.grid[0], plan.repeats, plan.seconds) == (3, (1, 1, 1, 1, 2), seconds)


def test_frames_of_different_sizes_and_missing_frames_are_reported(folder, encoder):
    first, other, absent = (str(folder / name) for name in ("0.png", "other.png", "9.png"))
    with pytest.raises(UserError, match=r"other.png: has 84 x 112 pixels, but the first frame of its video, "):
        encoder.planned(Video((first, other)))
    with pytest.raises(UserError, match=r"9.png: cannot be read: No such file"):
        encoder.planned(Video((first, absent)))
    with pytest.raises(UserError, match=r"video \['0.png', 7\]|expected the paths of its frames"):
        read_sample({"messages": [{"role": "user", "content": "<video>?"}, ANSWER], "videos": [["0.png", 7]]},
                    Attributes(), MediaRoots(str(folder)), "by hand:0")


FRAMES, ANSWER = ["0.png", "1.png"], {"role": "assistant", "content": "A digit."}


@pytest.mark.parametrize("record", [
    {"messages": [{"role": "user", "content": [{"type": "video", "video": FRAMES, "sample_fps": 1}]}, ANSWER]},
    {"messages": [{"role": "user", "content": "<video>"}, ANSWER], "videos": [FRAMES]},
    {"conversations": [{"from": "human", "value": "<video>"}, {"from": "gpt", "value": "A."}], "video": [FRAMES]},
])
def test_every_format_can_list_frames(folder, record):
    sample = read_sample(record, Attributes(), MediaRoots(str(folder)), "by hand:0")
    (video,) = sample.media
    assert video.path == (str(folder / "0.png"), str(folder / "1.png")) == video.files


def test_listed_frames_and_animations_pass_through_index_and_quarantine(folder, hf_directory, model_config, tmp_path):
    records = [{"messages": [{"role": "user", "content": "<video>What?"}, ANSWER], "videos": [video]}
               for video in (FRAMES, "moving.gif", ["0.png", "other.png"], "0.png")]
    path = tmp_path / "data.json"
    path.write_text(json.dumps(records))
    data = data_config(hf_directory, folder, path, cache_dir=str(tmp_path / "index"))
    dataset = Dataset(data, True, Measure.from_config(data, model_config, 4096))
    assert len(dataset) == 2
    several, still = dataset.skipped
    assert (several.index, still.index) == (2, 3)
    assert (several.path, still.path) == (str(folder / "other.png"), str(folder / "0.png"))
    assert "has 84 x 112 pixels, but the first frame of its video" in several.reason
    assert "is an image (PNG), not a video of a known format; use it as an image" in still.reason
