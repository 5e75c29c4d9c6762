"""Directories that a program is to write: whether they can be written, found before any work."""

import os
from collections.abc import Iterator
from pathlib import Path


def folder_problems(flag: str, path: str) -> Iterator[str]:
    """Why the directory ``path``, which ``flag`` gives and which need not be there yet, cannot be written."""
    folder = next(one for one in (Path(path).absolute(), *Path(path).absolute().parents) if one.exists())
    if not folder.is_dir():
        yield f"{flag} is {path!r}, but {folder} is a file; give a directory"
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield f"{flag} is {path!r}, but {folder} cannot be written; give another directory, or change its permissions"
