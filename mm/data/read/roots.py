"""Which files samples may show: those below the media roots, and nothing else on this machine.

Annotations are often other people's files, and a job reads with its owner's rights.  So a path must lead to a regular
file below a root once every link and ``..`` in it is followed; devices, pipes and addresses of the network are refused.
A picture may stand in the record itself, as a ``data:`` address.  What the files hold is not looked at here.
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
"""Of a picture in a record: every one is read with its record, so a larger one belongs into a file."""
_DATA = re.compile(r"data:(?P<type>[^;,]*)(?P<settings>[^,]*),", re.IGNORECASE)
_SPACE = re.compile(r"[ \t\r\n]+")
_SHOWN_CHARACTERS = 200
"""Of a path in messages: what is longer is none, but perhaps a whole picture."""
_MAX_REMEMBERED = 100_000
"""Paths whose answer is kept while a file is checked: pictures are often shared by samples."""
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
          stat.S_IFSOCK: "a socket"}  # fmt: skip


@dataclass(frozen=True)
class MediaRoots:
    """The folders below which media may lie.

    A relative path begins at ``directory``; where nothing is found there, at the working directory, as LLaMA-Factory
    reads it.  An absolute path is taken as it is.  Both count only below ``directory`` or one of ``others``: who has
    pictures elsewhere says so once, with ``media_roots`` in the data JSON.
    """

    directory: str
    others: tuple[str, ...] = ()
    settings: tuple[str, str] = ("dataset_dir", "basic_parameters.media_roots of the data JSON")
    """What names ``directory``, and what names ``others``; for messages."""

    @classmethod
    def beside(cls, file: str, others: tuple[str, ...]) -> "MediaRoots":
        """Those of a file of questions or prompts: its own folder, and what ``--media-roots`` names."""
        return cls(os.path.dirname(file) or ".", others,
                   ("the path, which begins beside the file that names it",
                    "--media-roots, or of a training in media_roots of the data JSON"))

    @cached_property
    def _real(self) -> tuple[str, ...]:
        return tuple(os.path.join(os.path.realpath(root), "") for root in self.all)

    def find(self, path: str, kind: str) -> str | Inline:
        """Where the file of an "image" or "video" is, or its content, where ``path`` is a ``data:`` address.

        Raises UserError when it is none that may be shown.
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
            except (OSError, ValueError):  # the latter for a null character and half characters
                continue
            if not stat.S_ISREG(mode):
                what = _KINDS.get(stat.S_IFMT(mode), "no file")
                raise UserError(f"{kind} {_shown(path)} is no regular file: {candidate!r} is {what}.")
            if not real.startswith(self._real):
                raise UserError(
                    f"{kind} {_shown(path)} leads to {real!r}, which is not below {' or '.join(map(repr, self.all))}; "
                    f"to allow that folder, name it in {self.settings[1]}.")
            return candidate
        hint = "" if len(path) <= _SHOWN_CHARACTERS else (
            f"; if it is the {kind} itself in base64, write data:image/png;base64, before it")
        raise UserError(f"{kind} {_shown(path)} is no regular file, neither as {_shown(joined)} nor as it is; check "
                        f"{self.settings[0]}{hint}.")

    @property
    def all(self) -> tuple[str, ...]:
        """Every folder, each once."""
        return tuple(dict.fromkeys((self.directory, *self.others)))


class KnownMedia:
    """``MediaRoots`` that remembers what it found, for one pass over many samples."""

    def __init__(self, roots: MediaRoots) -> None:
        self._roots = roots
        self._found: dict[tuple[str, str], str] = {}
        self.num_asked = 0

    def find(self, path: str, kind: str) -> str | Inline:
        """As ``MediaRoots.find``."""
        self.num_asked += 1
        found = self._found.get((path, kind))
        if found is not None:
            return found
        new = self._roots.find(path, kind)
        if isinstance(new, str):  # pictures in records would fill the memory
            if len(self._found) >= _MAX_REMEMBERED:
                self._found.clear()
            self._found[path, kind] = new
        return new


def _without_scheme(path: str, kind: str) -> str:
    """``path``, or that of a ``file://`` address."""
    if path.startswith("file://"):
        host, slash, rest = path.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            raise UserError(f"{kind} {path[:80]!r} is on the machine {host[:80]!r}; write file:///PATH for a file "
                            f"of this one.")
        return unquote(slash + rest)
    if "://" in path:
        raise UserError(f"{kind} {path[:80]!r} is not a local path, and nothing is fetched while training; download it "
                        f"and give the path of the file.")
    return path


def _inline(address: str, kind: str) -> Inline:
    """The picture in a ``data:`` address.  Raises UserError for what is none, and for one above the cap."""
    name = f"{address[:40]}..."
    match = _DATA.match(address)
    if kind != "image" or match is None or not match["type"].lower().startswith("image/"):
        raise UserError(f"{kind} {name!r} is no data:image/png;base64,... address, and only pictures may stand in a "
                        f"record; write it to a file and give the path of that.")
    if not match["settings"].lower().endswith(";base64"):
        raise UserError(f"{kind} {name!r} is not in base64; write data:{match['type']};base64, and the picture.")
    text = _SPACE.sub("", address[match.end() :])
    num_bytes = len(text) * 3 // 4 - text.count("=", -2)
    if num_bytes > MAX_INLINE_BYTES:
        raise UserError(f"{kind} {name!r} has {num_bytes:,} bytes, more than the {MAX_INLINE_BYTES:,} that a picture "
                        f"in a record may have; write it to a file and give the path of that.")
    try:
        return Inline(name, base64.b64decode(text, validate=True))
    except ValueError as error:  # also of characters outside ASCII
        raise UserError(f"{kind} {name!r} holds broken base64 ({error}); write the picture anew.") from error


def _shown(path: str) -> str:
    """``path`` as messages have it."""
    return repr(path if len(path) <= _SHOWN_CHARACTERS else f"{path[:_SHOWN_CHARACTERS]}...")
