"""Kinds of problems: what the messages of many samples have in common, and a picture of the first of each kind.

A message has no kind of its own.  Its kind is its text without what differs between samples: paths, numbers, quotes.
"""

import re
from collections.abc import Iterable

from mm.data.media.picture import jpeg, load_pixels
from mm.errors import UserError
from mm.report import Problem

_OF_ONE_SAMPLE = re.compile(
    r"""(?<!\w)'[^']*'|"[^"]*"  # quoted
    |(?<![\w.-])(?:[.~]{0,2}/[\w./~-]+|[\w./-]+/[\w-]+\.[\w.-]+)  # a path
    |(?<![\w.])\d(?:[\d,.]*\d)?  # a number""", re.VERBOSE)
"""What differs between samples of one kind."""
_PICTURE_PIXELS = 160
"""Longest side."""


def kind_of(reason: str, path: str | None = None) -> str:
    """The kind of a problem; ``path`` is the image or video that causes it, which may have spaces in its name."""
    return _OF_ONE_SAMPLE.sub("…", reason if path is None else reason.replace(path, "…")).removeprefix("…: ")


def pictures_by_kind(problems: Iterable[Problem]) -> dict[str, bytes]:
    """For each kind whose first problem is about an image that can be read, that image as a small JPEG."""
    first, found = dict[str, Problem](), dict[str, bytes]()
    for problem in problems:
        first.setdefault(problem.kind, problem)
    for kind, problem in first.items():
        if problem.path is None:
            continue
        try:
            found[kind] = jpeg(load_pixels(problem.path), _PICTURE_PIXELS)
        except UserError:
            continue  # it is a video, or the problem is that it cannot be read
    return found
