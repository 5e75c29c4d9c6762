"""Small files that appear whole, and lists of lines that are added to.

A reader of a replaced file sees the old one or the new one.  A process killed while it appends a line may leave part of
it, which readers ignore.
"""

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def write_whole(path: Path, content: bytes, *, syncs: bool = False) -> None:
    """Write ``content`` as ``replace_file`` does."""
    replace_file(path, lambda stream: stream.write(content), syncs=syncs)


def replace_file(path: Path, write: Callable[[IO[bytes]], Any], *, syncs: bool = False) -> None:
    """Write a file beside ``path`` and rename it; it keeps the permissions of what it replaces.

    ``syncs``: its content is on the disk before it has the name, so that a crash of the machine leaves one of the two.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as stream:
            write(stream)
            if syncs:
                stream.flush()
                os.fsync(stream.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def whole_lines(content: bytes) -> list[bytes]:
    """The lines of a list with their ends; without the part of a line that a killed process may have left."""
    return [line + b"\n" for line in content.split(b"\n")[:-1]]
