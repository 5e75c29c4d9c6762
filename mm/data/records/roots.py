"""Which files samples may use: those below the media roots, and no others on this machine.

Annotations are often written by other people, and a job reads with its owner's permissions.  So after resolving all
links and ``..``, a path must be a regular file below a root; devices, pipes and network addresses are refused.  An
image may also be embedded in the record as a ``data:`` URL.
"""

import base64
import os
import re
import stat
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import unquote

from mm.data.sample import Inline
from mm.errors import UserError

MAX_INLINE_BYTES = 1 << 24
"""Limit for an embedded image.  It is read with its record, so larger ones belong in files."""
_DATA = re.compile(r"data:image/[^;,]*[^,]*;base64,", re.IGNORECASE)
_SPACE = re.compile(r"[ \t\r\n]+")
_SHOWN_CHARACTERS = 200
"""Longest path in messages; a longer string is probably not a path but a whole image."""


@dataclass(frozen=True)
class MediaRoots:
    """The folders that may contain media: ``directory`` and ``others``.

    A relative path is resolved in ``directory``, or if it does not exist there, in the working directory, as in
    LLaMA-Factory.
    """

    directory: str
    others: tuple[str, ...] = ()
    settings: tuple[str, str] = ("dataset_dir", "basic_parameters.media_roots of the data JSON")
    """The settings that define ``directory`` and ``others``; for messages."""

    @classmethod
    def beside(cls, file: str, others: tuple[str, ...]) -> "MediaRoots":
        """The roots for a file of questions or prompts: its own folder, and those in ``--media-roots``."""
        return cls(os.path.dirname(file) or ".", others,
                   ("the path, which is relative to the file that contains it",
                    "--media-roots, or for training in media_roots of the data JSON"))

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.directory, *self.others)))

    @cached_property
    def _real(self) -> tuple[str, ...]:
        return tuple(os.path.join(os.path.realpath(root), "") for root in self.all)

    def find(self, path: str, kind: str) -> str | Inline:
        """The path of an "image" or "video", or its content if ``path`` is a ``data:`` URL.

        Raises UserError for a file that may not be used.
        """
        if path[:5].lower() == "data:":
            return _inline(path, kind)
        named = _without_scheme(path, kind)
        joined = os.path.join(self.directory, named)
        for candidate in dict.fromkeys((joined, named)):
            try:
                real = os.path.realpath(candidate)
                mode = os.stat(real).st_mode
            except PermissionError as error:
                raise UserError(f"{kind} {_shown(path)} cannot be read: {candidate!r}: {error.strerror}.") from error
            except (OSError, ValueError):  # ValueError for a null character and for lone surrogates
                continue
            if not stat.S_ISREG(mode):
                raise UserError(f"{kind} {_shown(path)} is not a regular file but a directory, pipe or device: "
                                f"{candidate!r}.")
            if not real.startswith(self._real):
                raise UserError(
                    f"{kind} {_shown(path)} resolves to {real!r}, which is not below "
                    f"{' or '.join(map(repr, self.all))}; to allow that folder, add it to {self.settings[1]}.")
            return candidate
        hint = "" if len(path) <= _SHOWN_CHARACTERS else (
            f"; if this is the {kind} itself in base64, put data:image/png;base64, before it")
        raise UserError(f"{kind} {_shown(path)} is not a regular file, neither as {_shown(joined)} nor relative to the "
                        f"working directory; check {self.settings[0]}{hint}.")


def _without_scheme(path: str, kind: str) -> str:
    """``path``, or the path of a ``file://`` URL."""
    if path.startswith("file://"):
        host, slash, rest = path.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            raise UserError(f"{kind} {_shown(path)} is on the machine {host[:80]!r}; write file:///PATH for a file on "
                            f"this one.")
        return unquote(slash + rest)
    if "://" in path:
        raise UserError(f"{kind} {_shown(path)} is not a local path, and nothing is downloaded during training; "
                        f"download it and give the path of the file.")
    return path


def _inline(address: str, kind: str) -> Inline:
    """The image in a ``data:`` URL.  Raises UserError if it is not one, or is too large."""
    name = f"{address[:40]}..."
    match = _DATA.match(address)
    if kind != "image" or match is None:
        raise UserError(f"{kind} {name!r} is not a data:image/png;base64,... URL, and only images may be embedded in a "
                        f"record; write it to a file and give its path.")
    text = _SPACE.sub("", address[match.end() :])
    num_bytes = len(text) * 3 // 4 - text.count("=", -2)
    if num_bytes > MAX_INLINE_BYTES:
        raise UserError(f"{kind} {name!r} has {num_bytes:,} bytes, above the limit of {MAX_INLINE_BYTES:,} for an "
                        f"image embedded in a record; write it to a file and give its path.")
    try:
        return Inline(name, base64.b64decode(text, validate=True))
    except ValueError as error:  # also raised for non-ASCII characters
        raise UserError(f"{kind} {name!r} contains broken base64 ({error}); encode the image again.") from error


def _shown(path: str) -> str:
    return repr(path if len(path) <= _SHOWN_CHARACTERS else f"{path[:_SHOWN_CHARACTERS]}...")
