"""Picture files of every kind: their content, and the errors for other files."""

import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from mm.data.media.image_decode import image_size, load_image, load_pixels
from mm.errors import UserError
from tests.data.oracle import photo

RGB = ("avif", "bmp", "dds", "dib", "icns", "jpg", "jp2", "mpo", "pcx", "png", "ppm", "qoi", "sgi", "tga", "tiff",
       "webp")
MODES = {**dict.fromkeys(RGB, "RGB"), "gif": "P", "msp": "1", "xbm": "1"}


@pytest.mark.parametrize("suffix", MODES)
def test_every_format_that_pillow_writes_is_read(tmp_path, suffix):
    path = tmp_path / f"photo.{suffix}"
    photo(64, 64, mode=MODES[suffix]).save(path)
    with Image.open(path) as image:
        expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(np.asarray(load_image(str(path))), expected)
    assert np.array_equal(load_pixels(str(path)), expected)
    assert image_size(str(path)) == expected.shape[1::-1]


def test_animation_gives_its_first_frame(tmp_path):
    frames = [photo(60, 60, seed=seed) for seed in (1, 2)]
    for suffix in ("gif", "tiff", "webp"):
        path = tmp_path / f"two.{suffix}"
        frames[0].save(path, save_all=True, append_images=frames[1:])
        with Image.open(path) as image:
            assert image.n_frames == 2
            assert np.array_equal(load_pixels(str(path)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
def test_16_bits_become_8_by_their_upper_half(tmp_path, suffix):
    """Pillow alone would make everything above 255 white."""
    values = np.arange(0, 65536, 17, dtype=np.uint16)[:3840].reshape(40, 96)
    path = tmp_path / f"deep.{suffix}"
    Image.fromarray(values).save(path)
    expected = np.repeat((values >> 8).astype(np.uint8)[..., None], 3, axis=2)
    assert np.array_equal(np.asarray(load_image(str(path))), expected)
    assert np.array_equal(load_pixels(str(path)), expected)


@pytest.mark.parametrize("orientation", range(1, 10))  # 9 is none
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_pixels_are_turned_as_images_are(tmp_path, suffix, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = str(tmp_path / f"turned.{suffix}")
    photo(90, 40).save(path, exif=exif)
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    assert np.array_equal(load_pixels(path), expected)
    assert image_size(path) == expected.shape[1::-1]
    assert image_size(path, is_upright=False) == (90, 40)


@pytest.mark.parametrize("load", [load_image, load_pixels])
def test_unusable_files_are_refused_by_name(tmp_path, load):
    for name in ("short.jpg", "short.png"):
        photo(300, 300).save(tmp_path / name, quality=95)
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:3000])
    photo(4, 4).save(tmp_path / "huge.png")
    data = bytearray((tmp_path / "huge.png").read_bytes())
    data[16:24] = (10_000).to_bytes(4, "big") * 2  # the size that its header claims
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    (tmp_path / "huge.png").write_bytes(data)
    photo(8, 8).save(tmp_path / "script.eps")
    (tmp_path / "page.jpg").write_text("<!DOCTYPE HTML><title>not found</title>")
    (tmp_path / "phone.jpg").write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))
    (tmp_path / "drawing.png").write_text('<?xml version="1.0"?><svg width="9"/>')
    (tmp_path / "pointer.png").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    (tmp_path / "noise.png").write_bytes(b"no picture at all")
    (tmp_path / "empty.png").touch()
    (tmp_path / "folder.png").mkdir()
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Comment", "x" * (PngImagePlugin.MAX_TEXT_CHUNK + 1), zip=True)
    photo(8, 8).save(tmp_path / "wordy.png", pnginfo=notes)
    expected = {
        "short.jpg": "damaged or truncated", "short.png": "damaged or truncated", "huge.png": "10000 x 10000 pixels",
        "script.eps": "it starts with b.%!PS", "page.jpg": "it is a web page", "phone.jpg": "it is HEIC.*with a plugin",
        "drawing.png": "a drawing", "pointer.png": "Git LFS.*git lfs pull", "noise.png": "starts with b'no picture",
        "wordy.png": "damaged or truncated .Decompressed data too large", "empty.png": "it is empty",
        "folder.png": "not a regular file", "absent.png": "No such file",
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        for name, message in expected.items():
            with pytest.raises(UserError, match=message) as error:
                load(str(tmp_path / name))
            assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "tiff", "avif", "gif", "bmp", "jp2", "ico"])
@pytest.mark.parametrize("share", [0.9, 0.5])
def test_a_truncated_picture_is_reported_as_truncated(tmp_path, kind, share):
    """Whichever part of Pillow detects it: the header, or the pixels."""
    path = tmp_path / f"short.{kind}"
    photo(120, 90).save(path, **({"compression": "tiff_lzw"} if kind == "tiff" else {}))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UserError, match=rf"short.{kind}: .*(damaged or truncated|is not an image)"):
            load_image(str(path))


@pytest.mark.parametrize(("content", "what"), [
    (b"\0\0\0\x20ftypisom" + bytes(40), r"it is a video \(MP4 or MOV\); use it as a video"),
    (b"\x1aE\xdf\xa3" + bytes(40), r"it is a video \(Matroska or WebM\); use it as a video"),
    (b"", "it is empty, or zeros left by a lost write"),
])  # fmt: skip
def test_other_content_is_named_with_the_fix(tmp_path, content, what):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(UserError, match=f"a.png: is not an image that Pillow can read: .*{what}"):
        image_size(str(tmp_path / "a.png"))
