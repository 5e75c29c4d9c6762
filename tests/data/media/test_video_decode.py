"""Good files of every structure are read, and damage that FFmpeg reports is refused."""

import platform
import re
from fractions import Fraction

import av
import numpy as np
import pytest

from mm.data.media import video_decode
from mm.data.media.video_header import read_header
from mm.data.media.video_patches import Clock, wanted_frames
from mm.errors import UserError
from tests.data.clips import all_frames, damage_frame, even, read, write_clip


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
    with av.open(str(path)) as container:
        entry = container.streams.video[0].index_entries[10]
    raw = bytearray(path.read_bytes())
    raw[entry.pos + entry.size // 2] ^= 4
    path.write_bytes(raw)
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
    settings = GOOD[name]
    path = str(write_clip(tmp_path / name, range(40) if "time_base" in settings else even(40), **settings))
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
    settings, decoded = GOOD[name], []
    path = str(write_clip(tmp_path / name, range(160) if "time_base" in settings else even(160), **settings))
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
    with av.open(str(path)) as container:
        entry = container.streams.video[0].index_entries[33]
    raw = bytearray(path.read_bytes())
    raw[entry.pos + 200 : entry.pos + 300] = bytes(range(100))
    path.write_bytes(raw)
    assert len(read(path, backend="decord")) == 60
