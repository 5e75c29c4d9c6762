"""Directories that a program will write: whether they can be written, whether two are the same, and the names of the
files that a run leaves in ``--log-dir``."""

import os
from collections.abc import Iterator
from pathlib import Path

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
