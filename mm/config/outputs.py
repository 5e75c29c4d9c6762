"""Directories that a program will write: whether they can be written, and whether two are the same."""

import os
from collections.abc import Iterator
from pathlib import Path


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
