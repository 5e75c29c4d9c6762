"""What one kind of file is for the driver: how valid ones are written, damaged and read."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.fuzz.mutate import OUTSIDE, Form

Reading = Callable[[], object]
"""Reads the files in the current directory as a command does."""


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Everything of a kind is in one directory: ``original`` is as written, ``target`` a damaged copy, ``beside`` holds
    what the reader needs besides and is never damaged.  The current directory is ``target``.
    """

    name: str
    write: Callable[[Path, Path], Reading]
    """Writes valid files into the first directory, with the help of the second; returns their reader."""
    forms: Mapping[str, Form]
    """Patterns of the names of files that are damaged, and how."""
    share: float = 1.0
    """Share of the mutations, compared with other kinds."""
    damages_folder: bool = True
    """Whether files may also be missing, or be links, directories or pipes; not where a run writes into the folder."""
    has_pipes: bool = True
    """Whether a file may also be a pipe; not where one is a way to give a file to a command."""
    words: tuple[str, ...] = ()
    """A message must have one of these, or the name of a file; () only for flags, whose messages name the flag."""

    def damage(self, target: Path, number: int, seed: int) -> str:
        """Damage a file in ``target`` as mutation ``number``; returns which and how."""
        rng = Random(f"{seed} {self.name} {number}")
        found = [(path, form) for pattern, form in self.forms.items() for path in sorted(target.glob(pattern))]
        path, form = found[rng.randrange(len(found))]
        name = path.relative_to(target)
        if self.damages_folder and rng.random() < 0.04:
            return f"{name}: {_replace(path, rng, [one for one, _ in found], self.has_pipes)}"
        content = path.read_bytes()
        path.unlink()  # the original is a link to the same file
        path.write_bytes(form(content, rng))
        return f"{name}: {form.__name__.removeprefix('_')}"


    def copy(self, original: Path, target: Path) -> None:
        """Make ``target`` a copy of ``original``; where the reader writes no files, it shares them.

        The directory itself stays: it is the current directory of processes that the reader has started.
        """
        for path in target.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        function = os.link if self.damages_folder else shutil.copy2
        shutil.copytree(original, target, copy_function=function, dirs_exist_ok=True)


def _replace(path: Path, rng: Random, others: Sequence[Path], may_be_pipe: bool) -> str:
    """Put something else in the place of a file; returns what."""
    other = rng.choice(others)
    content = other.read_bytes()
    path.unlink()
    match rng.randrange(6):
        case 0:
            return "missing"
        case 1:
            path.mkdir()
            return "a directory"
        case 2:
            path.symlink_to(f"{OUTSIDE}/file")
            return "a link to another file"
        case 3:
            path.symlink_to("nowhere")
            return "a broken link"
        case 4 if may_be_pipe:
            os.mkfifo(path)
            return "a pipe"
        case _:
            path.write_bytes(content)
            return f"the content of {other.name}"
