"""Small files are replaced atomically; a partial line is ignored."""

import hashlib
import io
import os
import socket
import subprocess
from pathlib import Path

import pytest

from mm.files import read_regular, regular, replace_file, sha256, wait_until_visible, whole_lines, write_whole


@pytest.mark.parametrize("syncs", [False, True])
def test_a_replaced_file_keeps_its_permissions(tmp_path: Path, syncs: bool) -> None:
    path = tmp_path / "folder" / "file"
    write_whole(path, b"old", syncs=syncs)
    path.chmod(0o604)
    write_whole(path, b"new", syncs=syncs)
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o604
    assert os.listdir(path.parent) == ["file"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """With the permissions that the umask leaves to a new file, not those of a temporary one."""
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "file").symlink_to(tmp_path / "precious")
    before = os.umask(0o027)
    write_whole(tmp_path / "new", b"new")
    write_whole(tmp_path / "file", b"new")
    os.umask(before)
    assert (tmp_path / "precious").read_text() == "kept" and not (tmp_path / "file").is_symlink()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def fail(stream) -> None:
        stream.write(b"ne")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        replace_file(path, fail)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(("content", "lines"), [
    (b"", []), (b"half", []), (b"1\n", [b"1\n"]), (b"1\n\n2\r\nhalf", [b"1\n", b"\n", b"2\r\n"])])
def test_a_partial_line_is_ignored(content: bytes, lines: list[bytes]) -> None:
    assert whole_lines(content) == lines


def test_a_file_that_appears_late_is_waited_for(tmp_path: Path) -> None:
    """Another process renames its directory into place, as a save does."""
    final = tmp_path / "iter_0000001"
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "manifest.json").touch()
    assert not wait_until_visible(final / "manifest.json", 0.0)
    with subprocess.Popen(["sh", "-c", f"sleep 0.5; mv {tmp_path / 'part'} {final}"]):
        assert wait_until_visible(final / "manifest.json", 60.0)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND | os.O_CREAT])
def test_only_a_regular_file_is_opened(tmp_path: Path, flags: int) -> None:
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").write_bytes(b"content")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "pipe", tmp_path / "socket", Path("/dev/null")):
            with pytest.raises(OSError, match=f"not a regular file: '{path}'"):
                regular(path, flags)
    for name in ("file", "link"):
        os.close(regular(tmp_path / name, flags))
    with pytest.raises(OSError, match="not a regular file"):
        regular(tmp_path / "link", flags | os.O_NOFOLLOW)
    assert read_regular(tmp_path / "link") == b"content"


@pytest.mark.parametrize("size", [0, 5, 1 << 18, (1 << 19) + 7])
def test_the_hash_of_a_stream_is_that_of_its_bytes(size: int) -> None:
    content = os.urandom(size)
    assert sha256(io.BytesIO(content)) == hashlib.sha256(content).hexdigest()
