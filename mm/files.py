"""Small files: replaced atomically, read by line although a line may be incomplete, and JSON that may be damaged.

Also directories that a program will write, and the names of the files that a run leaves in ``--log-dir``.
"""

import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_LOOK_SECONDS = 0.2
_READ_BYTES = 1 << 18


def write_whole(path: Path, content: bytes, *, syncs: bool = False) -> None:
    """Write ``content`` atomically; see ``replace_file``."""
    replace_file(path, lambda stream: stream.write(content), syncs=syncs)


def replace_file(path: Path, write: Callable[[IO[bytes]], Any], *, syncs: bool = False) -> None:
    """Write a temporary file beside ``path`` and rename it; it keeps the permissions of the file it replaces.

    ``syncs``: flush the content to disk before renaming, so that a crash of the machine leaves the old or the new file.
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


def regular(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """``os.open`` for a regular file, also as the ``opener`` of ``open``: a pipe or a device could block forever.

    A link to a file is followed, unless ``flags`` forbid it.  Raises OSError (ENXIO or ELOOP) for anything else.
    """
    try:
        opened = os.open(path, flags | os.O_NONBLOCK, mode)
    except OSError as error:
        number = error.errno
        if number not in (errno.ENXIO, errno.ELOOP):
            raise
    else:
        if stat.S_ISREG(os.fstat(opened).st_mode):
            return opened
        os.close(opened)
        number = errno.ENXIO
    raise OSError(number, "it is a link, pipe, device or directory, not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """The content of a file, opened by ``regular``."""
    with open(path, "rb", opener=regular) as stream:
        return stream.read()


def wait_until_visible(path: Path, seconds: float) -> bool:
    """Whether a file is seen in time that exists, but that a network file system may show up to a minute late."""
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            return False
        for folder in (path.parent.parent, path.parent):
            with suppress(OSError):
                os.listdir(folder)  # asks the server again
        time.sleep(_LOOK_SECONDS)
    return True


def sha256(stream: IO[bytes]) -> str:
    """SHA-256 of the rest of ``stream`` as hexadecimal digits; ``hashlib.file_digest`` needs Python 3.11."""
    found = hashlib.sha256()
    while block := stream.read(_READ_BYTES):
        found.update(block)
    return found.hexdigest()


def json_value(raw: bytes | str) -> Any:
    """Parse JSON; anything that cannot be parsed, deep nesting included, raises ValueError."""
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise ValueError("too many levels of nesting") from error


def json_object(raw: bytes | str) -> dict[str, Any]:
    """Parse a JSON object; anything else raises ValueError."""
    value = json_value(raw)
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, not an object")
    return value


def complete(lines: Iterable[bytes]) -> Iterator[bytes]:
    """``lines`` without an incomplete last line, which a killed process may leave."""
    return (line for line in lines if line.endswith(b"\n"))


def whole_lines(content: bytes) -> list[bytes]:
    """The complete lines of a file that was read as a whole."""
    return list(complete(io.BytesIO(content)))


METRICS_FILE, FACTS_FILE, PAGE_FILE = "metrics.jsonl", "run.json", "run.html"
ANSWERS_FOLDER = "answers"
"""Scored answers to the questions of a run, in a folder for each iteration."""
PREDICTIONS_FILE = "predictions.jsonl"
"""Every question with its answer and score."""
THUMBNAILS_FOLDER = "thumbnails"
"""Small copies of the questions' images in ``ANSWERS_FOLDER``."""
MAX_THUMBNAILS = 4
"""Images of a question that a page shows."""


def folder_problems(flag: str, path: str) -> Iterator[str]:
    """Why the directory ``path``, given by ``flag``, cannot be written; it need not exist yet."""
    folder = next(one for one in (Path(path).absolute(), *Path(path).absolute().parents) if os.path.exists(one))
    if not os.path.isdir(folder):
        yield f"{flag} is {path!r}, but {folder} is a file; give a directory"
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield f"{flag} is {path!r}, but {folder} cannot be written; give another directory, or change its permissions"


def is_same_directory(one: str | None, other: str | None) -> bool:
    """Whether both are given and name the same directory."""
    return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()
