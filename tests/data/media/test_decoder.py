"""The decoder's process: images have the same pixels, and neither they nor videos can do it or its parent harm."""

import contextlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
import zlib

import numpy as np
import psutil
import pytest
from PIL import Image

from mm.data.media.decoder import Decoder
from mm.data.media.frames import Clock, wanted_frames
from mm.data.media.picture import image_size, load_image, load_pixels
from mm.data.sample import Inline
from mm.errors import UserError
from tests.data.clips import all_frames, even, read, write_clip
from tests.data.oracle import photo


@pytest.fixture(scope="module")
def decoder():
    one = Decoder()
    yield one
    one.close()


def turned(path, suffix):
    exif = Image.Exif()
    exif[0x0112] = 6
    photo(90, 60).save(path / f"turned.{suffix}", exif=exif)
    return path / f"turned.{suffix}"


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "avif", "tiff", "gif"])
@pytest.mark.parametrize("is_upright", [True, False])
def test_pixels_are_those_of_this_process(decoder, tmp_path, suffix, is_upright):
    path = turned(tmp_path, suffix)
    for source in (str(path), Inline("data:", path.read_bytes())):
        expected = np.asarray(load_image(source, is_upright))
        assert decoder.picture_size(source, is_upright) == image_size(source, is_upright) == expected.shape[1::-1]
        assert np.array_equal(decoder.picture(source, is_upright), expected)
        assert np.array_equal(decoder.picture(source, is_upright, is_fast=True), load_pixels(source, is_upright))
    steps = [((50, 50), Image.Resampling.NEAREST), ((28, 56), Image.Resampling.BICUBIC)]
    image = load_image(str(path), is_upright)
    found = decoder.resized(str(path), image.size, steps, is_upright, True)
    assert np.array_equal(found, np.asarray(image.resize(*steps[0]).resize(*steps[1])))
    with pytest.raises(UserError, match=f"turned.{suffix}: its header and its pixels disagree on the size .9 x 9 and "):
        decoder.resized(str(path), (9, 9), steps, is_upright, True)


def test_a_long_header_is_read_by_the_process(decoder, tmp_path):
    """A preview before the size, as cameras write it."""
    photo(64, 48).save(tmp_path / "plain.jpg")
    raw = (tmp_path / "plain.jpg").read_bytes()
    (tmp_path / "long.jpg").write_bytes(raw[:2] + b"\xff\xec\xff\xff" * 1 + bytes(65533) + raw[2:])
    assert decoder.picture_size(str(tmp_path / "long.jpg")) == (64, 48)


def jpeg_of_scans(path, num_scans):
    """A progressive image that says the same again and again: each scan takes time in proportion to the pixels."""
    Image.fromarray(np.zeros((4000, 4000), dtype=np.uint8)).save(path, progressive=True, quality=50)
    raw = path.read_bytes()
    last = raw.rindex(b"\xff\xda")
    scan = raw[last:-2]
    path.write_bytes(raw[:-2] + scan * num_scans + raw[-2:])


def test_an_image_that_takes_too_long_is_refused_in_time_and_the_next_is_read(tmp_path):
    jpeg_of_scans(tmp_path / "scans.jpg", 2000)
    photo(64, 48).save(tmp_path / "good.jpg")
    hasty, start = Decoder(picture_seconds=0.5), time.monotonic()
    for is_fast in (True, False):
        with pytest.raises(UserError, match=r"scans.jpg: decoding took more than 0.5 s of CPU time; save the image"):
            hasty.picture(str(tmp_path / "scans.jpg"), is_fast=is_fast)
    assert time.monotonic() - start < 30
    assert hasty.picture(str(tmp_path / "good.jpg")).shape == (48, 64, 3)
    hasty.close()


def chunk(name, content):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width, height, *chunks):
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + b"".join(chunks)


BOMBS = {
    "pixels.png": png(65000, 65000, chunk(b"IDAT", zlib.compress(bytes(1000))), chunk(b"IEND", b"")),
    "text.png": png(8, 8, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(400 << 20), 9))),
    "profile.png": png(8, 8, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(300 << 20), 9))),
    "short.png": png(7000, 7000, chunk(b"IDAT", zlib.compress(bytes(100)))),
    "frames.gif": b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(6) + b"!\xff\x0bNETSCAPE2.0\x03\x01\0\0\0" * 1000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_take_neither_time_nor_memory(decoder, tmp_path, name):
    (tmp_path / name).write_bytes(BOMBS[name])
    me, start = psutil.Process(), time.monotonic()
    before = me.memory_info().rss
    with pytest.raises(UserError, match=name):
        decoder.picture(str(tmp_path / name))
    with contextlib.suppress(UserError):  # some have a good header
        decoder.picture_size(str(tmp_path / name))
    assert time.monotonic() - start < 10
    assert me.memory_info().rss - before < 200 << 20


def test_the_process_has_a_limit_of_memory_and_leaves_no_core(decoder, tmp_path):
    """The same process reads videos: one whose decoder asks for more gets an error of the system."""
    photo(64, 48).save(tmp_path / "good.png")
    decoder.picture(str(tmp_path / "good.png"))
    write_clip(tmp_path / "clip.mp4", range(5))
    number = decoder._process.pid
    decoder.header(str(tmp_path / "clip.mp4"), True)
    assert decoder._process.pid == number
    process = psutil.Process(number)
    assert 4 << 30 < process.rlimit(psutil.RLIMIT_AS)[0] < 6 << 30
    assert process.rlimit(psutil.RLIMIT_CORE)[0] == 0


def test_a_crash_in_a_decoder_is_an_error_about_the_image(decoder, tmp_path):
    photo(64, 48).save(tmp_path / "good.webp")
    decoder.picture(str(tmp_path / "good.webp"))
    os.kill(decoder._process.pid, signal.SIGSEGV)
    decoder._process._process.wait()
    with pytest.raises(UserError, match=r"good.webp: its decoder ended by signal SIGSEGV; the image is damaged"):
        decoder.picture(str(tmp_path / "good.webp"))
    assert decoder.picture(str(tmp_path / "good.webp")).shape == (48, 64, 3)
    assert pickle.loads(pickle.dumps(decoder))._process.pid is None


# Row 46: the process


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A clip with one key frame: to reach its last frame, all 150 must be decoded."""
    return write_clip(tmp_path_factory.mktemp("slow") / "slow.mp4", even(150), size=(480, 320), gop=1000)


def test_a_slow_decoder_is_killed_and_the_next_video_is_read(decoder, slow):
    header = decoder.header(str(slow), True)
    clock = Clock.of(header, None, None)
    hasty = Decoder(None, 0.004)
    with pytest.raises(UserError, match=r"slow.mp4: decoding took more than 0.004 s; .* raise video_timeout"):
        list(hasty.frames(str(slow), wanted_frames(clock, np.array([149]), True)))
    hasty._limit_seconds = 60.0
    assert len(read(hasty, slow, [0, 1])) == 2
    hasty.close()


def test_the_time_limit_is_for_all_frames_together(decoder, slow):
    """A quarter of the CPU time that they take on this machine: more than enough for any single frame."""
    clock = Clock.of(decoder.header(str(slow), True), None, None)
    wanted = wanted_frames(clock, np.arange(150), True)
    process = psutil.Process(decoder._process.pid)
    before = sum(process.cpu_times()[:2])
    list(decoder.frames(str(slow), wanted))
    hasty = Decoder(None, (sum(process.cpu_times()[:2]) - before) / 4)
    with pytest.raises(UserError, match=r"slow.mp4: decoding took more than 0.\d+ s; "):
        list(hasty.frames(str(slow), wanted))
    hasty.close()


def test_the_time_of_a_slow_reader_does_not_count(tmp_path):
    """A frame fills the pipe, so the decoder waits longer than its time limit."""
    path = write_clip(tmp_path / "clip.mp4", even(4), size=(480, 320))
    patient = Decoder(None, 60.0)
    header = patient.header(str(path), True)
    patient._limit_seconds = 2.0
    frames = patient.frames(str(path), wanted_frames(Clock.of(header, None, None), np.arange(4), True))
    next(frames)
    time.sleep(2.2)
    assert len(list(frames)) == 3
    patient.close()


def test_a_killed_decoder_is_reported_and_restarted(decoder, tmp_path):
    path = write_clip(tmp_path / "clip.mp4", even(5))
    decoder.header(str(path), True)
    process = decoder._process._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(UserError, match=r"clip.mp4: its decoder ended by signal SIGKILL; the video is damaged, or mem"):
        decoder.header(str(path), True)
    assert len(read(decoder, path)) == 5


def test_unread_frames_do_not_answer_the_next_request(decoder, tmp_path):
    path = write_clip(tmp_path / "clip.mp4", even(20))
    header = decoder.header(str(path), True)
    frames = decoder.frames(str(path), wanted_frames(Clock.of(header, None, None), np.arange(20), True))
    next(frames)
    frames.close()
    assert np.array_equal(read(decoder, path, [3])[0], all_frames(path)[0][3])


def test_a_decoder_ends_with_its_parent(tmp_path):
    """However the parent ends: a data worker is killed with its trainer."""
    path = write_clip(tmp_path / "clip.mp4", even(3))
    code = (f"from mm.data.media.decoder import Decoder; import os; "
            f"one = Decoder(None, 60.0); one.header({str(path)!r}, 1); "
            f"print(one._process.pid, flush=True); os.kill(os.getpid(), 9)")
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == -signal.SIGKILL, answer.stderr
    while is_running(int(answer.stdout)):  # it would never end, and the test with it
        time.sleep(0.01)


def held_bytes(decoder):
    return psutil.Process(decoder._process.pid).memory_info().rss


def is_running(number):
    """Whether a process has not ended; zombies count as ended."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_files_are_closed_and_memory_is_freed(decoder, tmp_path):
    good, bad = write_clip(tmp_path / "clip.mp4", even(9)), tmp_path / "bad.mp4"
    bad.write_bytes(b"nothing")
    read(decoder, good)
    decoder.header(str(good), True)
    process = psutil.Process(decoder._process.pid)
    before, large = process.num_fds(), write_clip(tmp_path / "large.mp4", even(3), size=(1920, 1088))
    for _ in range(5):
        read(decoder, large)
    held = held_bytes(decoder)
    for _ in range(30):  # each has 15 MB of decoded frames
        read(decoder, large, [1])
    assert held_bytes(decoder) < held + 30_000_000
    for _ in range(10):
        read(decoder, good)
        with pytest.raises(UserError):
            decoder.header(str(bad), True)
    decoder.header(str(good), True)
    assert process.num_fds() == before
