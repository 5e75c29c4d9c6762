"""Nothing outside the media roots is shown, however its path is written."""

import base64
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from mm.data.media.picture import image_size
from mm.data.read.roots import MAX_INLINE_BYTES, KnownMedia, MediaRoots
from mm.errors import UserError
from tests.data.oracle import photo


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """``media`` with a picture, links and things that are none; ``other`` and ``media_evil`` beside it."""
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
def test_what_lies_below_the_root_is_found(root, path):
    found = MediaRoots(str(root / "media")).find(path.format(root=root), "image")
    assert Path(found).resolve().is_relative_to(root / "media/in")


@pytest.mark.parametrize("path", ["../other/b.png", "in/../../other/b.png", "{root}/other/b.png", "out.png",
                                  "out/b.png", "{root}/media/../other/b.png", "file://{root}/other/b.png",
                                  "../media_evil/c.png", "file://{root}/media/..%2Fother/b.png", "/etc/passwd"])
def test_what_leads_out_is_refused_with_the_key_to_set(root, path):
    with pytest.raises(UserError, match=r"which is not below .*media'; .* basic_parameters.media_roots"):
        MediaRoots(str(root / "media")).find(path.format(root=root), "image")


@pytest.mark.parametrize("path", ["../other/b.png", "out.png", "out/b.png", "{root}/other/b.png"])
def test_other_roots_are_named(root, path):
    assert MediaRoots(str(root / "media"), (str(root / "other"),)).find(path.format(root=root), "image")


@pytest.mark.parametrize(("path", "what"), [
    ("in", "is a directory"), (".", "is a directory"), ("pipe.png", "is a pipe"), ("/dev/null", "is a device"),
    ("no.png", "no regular file, neither as"), ("loop.png", "no regular file, neither as"),
    ("a\0b.png", "no regular file, neither as"), ("\ud800.png", "no regular file, neither as"),
    ("http://x/a.png", "nothing is fetched"), ("https:\\\\x", "no regular file"), ("s3://bucket/a.png", "is fetched"),
    ("file://[host/a.png", "on the machine '[host'"),
    ("file://host/a.png", "on the machine 'host'"), ("A" * 300, "if it is the image itself in base64, write data:"),
    ("data:image/png;base64,AAA", "broken base64 (Incorrect padding"), ("data:image/png;base64,A-_=", "broken base64"),
    ("data:image/png;base64,\xe4AAA", "broken base64"), ("data:image/png;base64", "is no data:image/png;base64,"),
    ("data:image/png,AAAA", "is not in base64"), ("data:text/html;base64,AAAA", "is no data:image/png;base64,"),
    ("data:,AAAA", "is no data:image/png;base64,"), ("data:image/png;base64,=" + "A" * 10**6, "broken base64"),
    ("data:image/png;base64," + "A" * (4 * MAX_INLINE_BYTES // 3 + 4), "16,777,218 bytes, more than the 16,777,216"),
], ids=lambda text: text[:40])
def test_what_is_no_file_is_refused(root, path, what):
    with pytest.raises(UserError) as error:
        MediaRoots(str(root / "media")).find(path, "image")
    assert what in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize("start", ["data:image/png;base64,", "DATA:image/jpeg;name=a;base64,", "data:IMAGE/x;BASE64,"])
def test_a_picture_in_the_record_needs_no_file(root, start):
    content = bytes(range(256)) * 3
    encoded = base64.b64encode(content).decode()
    media = KnownMedia(MediaRoots(str(root / "media")))
    for text in (encoded, "\n".join(encoded[place : place + 76] for place in range(0, len(encoded), 76)) + "\r\n"):
        found = media.find(start + text, "image")
        assert found.content == content and str(found) == f"{(start + text)[:40]}..." and "\\x00" not in repr(found)
        with pytest.raises(UserError, match="only pictures may stand in a record"):
            media.find(start + text, "video")
    largest = media.find("data:image/png;base64," + base64.b64encode(bytes(MAX_INLINE_BYTES)).decode(), "image")
    assert largest.content == bytes(MAX_INLINE_BYTES)


def test_a_relative_path_may_begin_at_the_working_directory(root, monkeypatch):
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


def test_what_was_found_is_remembered_and_what_was_not_is_not(root):
    media = KnownMedia(MediaRoots(str(root / "media")))
    with pytest.raises(UserError):
        media.find("new.png", "image")
    (root / "media/new.png").touch()
    assert media.find("new.png", "image") == media.find("new.png", "image") == str(root / "media/new.png")


def test_a_folder_or_picture_that_may_not_be_read_is_told_as_such():
    """Row 31.  Root may read everything, so it becomes nobody meanwhile."""
    folder = Path(tempfile.mkdtemp())
    (folder / "closed").mkdir()
    (folder / "closed" / "a.png").touch()
    photo(30, 30).save(folder / "b.png")
    folder.chmod(0o755)
    (folder / "closed").chmod(0)
    (folder / "b.png").chmod(0)
    is_root = os.geteuid() == 0
    os.seteuid(65534 if is_root else os.geteuid())
    try:
        with pytest.raises(UserError, match=r"image 'closed/a.png' cannot be read: .*: Permission denied"):
            MediaRoots(str(folder)).find("closed/a.png", "image")
        with pytest.raises(UserError, match=r"b.png: cannot be read: Permission denied"):
            image_size(str(MediaRoots(str(folder)).find("b.png", "image")))
    finally:
        os.seteuid(0 if is_root else os.geteuid())
        (folder / "closed").chmod(0o700)
        shutil.rmtree(folder)
