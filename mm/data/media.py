"""Which files samples may show: those below the media roots, and nothing else on this machine.

Annotations are often other people's files, and a job reads with its owner's rights.  So a path must lead to a regular
file below a root once every link and ``..`` in it is followed; devices, pipes and addresses of the network are refused.
What the files hold is not looked at here.
"""

import os
import stat
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import unquote

from mm.errors import UserError

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

    @cached_property
    def _real(self) -> tuple[str, ...]:
        return tuple(os.path.join(os.path.realpath(root), "") for root in self.all)

    def find(self, path: str, kind: str) -> str:
        """Where the file of an "image" or "video" is.  Raises UserError when it is none that may be shown."""
        named = _without_scheme(path, kind)
        joined = os.path.join(self.directory, named)
        for candidate in dict.fromkeys((joined, named)):
            try:
                real = os.path.realpath(candidate)
                mode = os.stat(real).st_mode
            except (OSError, ValueError):  # the latter for a null character and half characters
                continue
            if not stat.S_ISREG(mode):
                what = _KINDS.get(stat.S_IFMT(mode), "no file")
                raise UserError(f"{kind} {path!r} is no regular file: {candidate!r} is {what}.")
            if not real.startswith(self._real):
                raise UserError(
                    f"{kind} {path!r} leads to {real!r}, which is not below {' or '.join(map(repr, self.all))}; to "
                    f"allow that folder, name it in basic_parameters.media_roots of the data JSON.")
            return candidate
        raise UserError(f"{kind} {path!r} is no regular file, neither as {joined!r} nor as it is; check dataset_dir.")

    @property
    def all(self) -> tuple[str, ...]:
        """Every folder, each once."""
        return tuple(dict.fromkeys((self.directory, *self.others)))


class KnownMedia:
    """``MediaRoots`` that remembers what it found, for one pass over many samples."""

    def __init__(self, roots: MediaRoots) -> None:
        self._roots = roots
        self._found: dict[tuple[str, str], str] = {}

    def find(self, path: str, kind: str) -> str:
        """As ``MediaRoots.find``."""
        found = self._found.get((path, kind))
        if found is None:
            if len(self._found) >= _MAX_REMEMBERED:
                self._found.clear()
            found = self._found[path, kind] = self._roots.find(path, kind)
        return found


def _without_scheme(path: str, kind: str) -> str:
    """``path``, or that of a ``file://`` address."""
    if path.startswith("file://"):
        host, slash, rest = path.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            raise UserError(f"{kind} {path[:80]!r} is on the machine {host[:80]!r}; write file:///PATH for a file "
                            f"of this one.")
        return unquote(slash + rest)
    if path.startswith("data:"):
        raise UserError(f"{kind} {path[:40]!r}... holds the {kind} itself and is not a local path; write it to a file "
                        f"and give the path of that.")
    if "://" in path:
        raise UserError(f"{kind} {path[:80]!r} is not a local path, and nothing is fetched while training; download it "
                        f"and give the path of the file.")
    return path
