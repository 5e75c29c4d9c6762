"""Nothing outside the media roots is used, however its path is written."""

import base64
import os
from pathlib import Path

import pytest

from mm.data.records.roots import MAX_INLINE_BYTES, MediaRoots
from mm.errors import UserError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """``media`` with a picture, links and other things; ``other`` and ``media_evil`` beside it."""
    for name in ("media/in/a.png", "other/b.png", "media_evil/c.png", "media/in/d e.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "media/out.png").symlink_to(tmp_path / "other/b.png")
    (tmp_path / "media/out").symlink_to(tmp_path / "other")
    (tmp_path / "media/inside.png").symlink_to("in/a.png")
    (tmp_path / "media/loop.png").symlink_to("loop.png")
    os.mkfifo(tmp_path / "media/pipe.png")
    return tmp_path


@pytest.mark.parametrize("path", ["in/a.png", "./in/../in/a.png", "inside.png", "{root}/media/in/a.png",
                                  "file://{root}/media/in/a.png", "file://localhost{root}/media/in/d%20e.png"])
def test_files_below_the_root_are_found(root, path):
    found = MediaRoots(str(root / "media")).find(path.format(root=root), "image")
    assert Path(found).resolve().is_relative_to(root / "media/in")


@pytest.mark.parametrize("path", ["../other/b.png", "in/../../other/b.png", "{root}/other/b.png", "out.png",
                                  "out/b.png", "{root}/media/../other/b.png", "file://{root}/other/b.png",
                                  "../media_evil/c.png", "file://{root}/media/..%2Fother/b.png", "/etc/passwd"])
def test_paths_out_of_the_root_are_refused_with_the_setting_to_change(root, path):
    with pytest.raises(UserError, match=r"which is not below .*media'; .* basic_parameters.media_roots"):
        MediaRoots(str(root / "media")).find(path.format(root=root), "image")


@pytest.mark.parametrize("path", ["../other/b.png", "out.png", "out/b.png", "{root}/other/b.png"])
def test_other_roots_are_named(root, path):
    assert MediaRoots(str(root / "media"), (str(root / "other"),)).find(path.format(root=root), "image")


@pytest.mark.parametrize(("path", "what"), [
    ("in", "is not a regular file but"), ("pipe.png", "is not a regular file but"), ("/dev/null", "regular file but"),
    ("no.png", "not a regular file, neither as"), ("loop.png", "not a regular file, neither as"),
    ("a\0b.png", "not a regular file, neither as"), ("\ud800.png", "not a regular file, neither as"),
    ("http://x/a.png", "nothing is downloaded"), ("s3://bucket/a.png", "is downloaded"),
    ("https://user:word@host/a.png", "'https://[hidden]@host/a.png' is not a local path"),
    ("file://host/a.png", "on the machine 'host'"), ("A" * 300, "if this is the image itself in base64, put data:"),
    ("data:image/png;base64,AAA", "broken base64 (Incorrect padding"),
    ("data:image/png;base64,\xe4AAA", "broken base64"), ("data:image/png,AAAA", "is not a data:image/png;base64,"),
    ("data:text/html;base64,AAAA", "is not a data:image/png;base64,"),
    ("data:image/png;base64," + "A" * (4 * MAX_INLINE_BYTES // 3 + 4), "16,777,218 bytes, above the limit of 16,777"),
], ids=lambda text: text[:40])
def test_other_paths_are_refused(root, path, what):
    with pytest.raises(UserError) as error:
        MediaRoots(str(root / "media")).find(path, "image")
    assert what in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize("start", ["data:image/png;base64,", "DATA:image/jpeg;name=a;base64,", "data:IMAGE/x;BASE64,"])
def test_an_embedded_picture_needs_no_file(root, start):
    content = bytes(range(256)) * 3
    encoded = base64.b64encode(content).decode()
    media = MediaRoots(str(root / "media"))
    for text in (encoded, "\n".join(encoded[place : place + 76] for place in range(0, len(encoded), 76)) + "\r\n"):
        found = media.find(start + text, "image")
        assert found.content == content and str(found) == f"{(start + text)[:40]}..." and "\\x00" not in repr(found)
        with pytest.raises(UserError, match="only images may be embedded in a record"):
            media.find(start + text, "video")
    largest = media.find("data:image/png;base64," + base64.b64encode(bytes(MAX_INLINE_BYTES)).decode(), "image")
    assert largest.content == bytes(MAX_INLINE_BYTES)


def test_a_path_may_be_relative_to_the_working_directory(root, monkeypatch):
    """As the example's converter writes them."""
    monkeypatch.chdir(root)
    assert MediaRoots("media").find("./media/in/a.png", "image") == "./media/in/a.png"
    with pytest.raises(UserError, match="media_roots"):
        MediaRoots("media").find("other/b.png", "image")


def test_the_root_may_be_a_link(root):
    (root / "link").symlink_to(root / "media")
    assert MediaRoots(str(root / "link")).find("in/a.png", "image") == str(root / "link/in/a.png")
    with pytest.raises(UserError, match="media_roots"):
        MediaRoots(str(root / "link")).find("out.png", "image")
