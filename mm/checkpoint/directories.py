"""Directories that appear complete or not at all, and which checkpoints of a training a directory holds.

Everything is written to a temporary sibling, which is renamed at the end.  If a conversion is interrupted, its finished
files stay there, and the same conversion continues after them.

``<dir>/latest_checkpointed_iteration.txt`` holds the newest iteration as text (Megatron's file); each checkpoint is a
directory ``<dir>/iter_0000010``, complete by its name.  Other directories, such as ``.tmp-``, are leftovers and count
as nothing.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm.checkpoint.manifest import MANIFEST_FILE, read_head
from mm.errors import UserError, refuse
from mm.files import regular
from mm.weights.views import TargetFile

Crc32s = Mapping[str, int]


@dataclass(frozen=True)
class Modes:
    """Permissions of directories and files, before the umask is applied."""

    directory: int
    file: int


MEGATRON_MODES = Modes(0o750, 0o640)
"""Megatron's and MindSpeed-MM's permissions for checkpoints."""
PLAIN_MODES = Modes(0o777, 0o666)
"""Default permissions: only the umask restricts them."""
PART = ".part"
"""End of the name of a file that is not finished."""


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(finished: Path, target: Path, aside: Path) -> None:
    """Rename a directory, already flushed to disk, to ``target``.  An existing target is renamed to ``aside``."""
    replaces = target.exists()
    if replaces:
        target.rename(aside)
    try:
        finished.rename(target)
    except OSError:
        if replaces:
            aside.rename(target)
        raise
    sync(target.parent)


@contextmanager
def unfinished(target: Path, conversion: str, modes: Modes) -> Iterator[Path]:
    """The temporary directory of ``target``, locked, with the files that an interrupted ``conversion`` has finished.

    ``conversion`` identifies sources and target; what another one left is deleted.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder, path = _sibling(target), _sibling(target, ".lock")
    refuse(f"{one}: is a link, which mm-convert never makes; remove it, or give another target."
           for one in (path, folder, _sibling(target, ".old")) if one.is_symlink())
    with os.fdopen(regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, modes.file), "r+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = path.exists() and os.path.samestat(path.stat(), os.fstat(lock.fileno()))
        except BlockingIOError:
            is_current = False
        if not is_current:  # locked by another process, or just removed by one that is completing
            raise UserError(f"Another mm-convert is writing {target} (it holds {path}); wait for it, or give another "
                            f"target.")
        if not folder.is_dir() or lock.read() != conversion.encode():
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(mode=modes.directory)
            lock.truncate(0)
            lock.seek(0)
            lock.write(conversion.encode())
            lock.flush()
        yield folder


def begin_file(folder: Path, file: TargetFile, modes: Modes) -> None:
    """Create ``file`` under its name with ``PART`` at its full size, to be filled."""
    for parent in reversed(Path(file.name).parents):  # mkdir(parents=True) ignores the mode for parents
        (folder / parent).mkdir(mode=modes.directory, exist_ok=True)
    part = os.open(folder / (file.name + PART), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, modes.file)
    try:
        os.ftruncate(part, file.num_bytes)
    finally:
        os.close(part)


def finish_file(folder: Path, file: TargetFile, crc32s: Crc32s) -> None:
    """Add the frame of ``file``, whose tensors are written, flush it, and give it its name."""
    part = folder / (file.name + PART)
    with part.open("r+b", buffering=0) as opened:
        for offset, data in file.frame(crc32s):
            os.pwrite(opened.fileno(), data, offset)
        os.fsync(opened)
    part.rename(folder / file.name)


def commit(folder: Path, target: Path) -> None:
    """Flush the temporary directory of ``target`` to disk, rename it, and delete the old target."""
    for path in (*folder.rglob("*"), folder):
        sync(path)
    shutil.rmtree(_sibling(target, ".old"), ignore_errors=True)
    put_in_place(folder, target, _sibling(target, ".old"))
    delete_leftovers(target)


def delete_leftovers(target: Path) -> None:
    """Delete what is beside a complete ``target``."""
    shutil.rmtree(_sibling(target, ".old"), ignore_errors=True)
    _sibling(target, ".lock").unlink(missing_ok=True)


def left_bytes(target: Path) -> int:
    """Disk space of files that an interrupted run left for ``target``; they will be reused or freed."""
    folder = _sibling(target)
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*")) if folder.is_dir() else 0


def _sibling(target: Path, suffix: str = "") -> Path:
    return target.with_name(f".{target.name}.mm-convert{suffix}")


# Checkpoints of a training

LATEST_FILE = "latest_checkpointed_iteration.txt"
UNREADABLE = ""
"""Stands for the run id if the manifest cannot be read; no run has this id."""
ITERATION_NAME = re.compile(r"iter_(\d{7,})")
LEFTOVER_NAME = re.compile(r"iter_\d{7,}\.(?:(?:tmp|old)-\w+|dying)")
"""What interrupted saves leave; earlier versions saved ``.dying`` when a run failed."""


def named_iteration(text: str) -> int | None:
    """The iteration that a text names as a number; None for other text."""
    return int(text) if text.isdecimal() else None


def iteration_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def is_only_copy(leftover: Path) -> bool:
    """Whether it is a complete checkpoint, moved aside or of a failed run, and there is no other of its iteration."""
    final = leftover.with_name(leftover.name.partition(".")[0])
    return ".tmp-" not in leftover.name and (leftover / MANIFEST_FILE).is_file() and not (
        final / MANIFEST_FILE).is_file()


def complete_iterations(directory: Path) -> list[int]:
    """Iterations of complete checkpoints, ascending."""
    matches = [ITERATION_NAME.fullmatch(path.parent.name) for path in directory.glob(f"iter_*/{MANIFEST_FILE}")]
    return sorted(int(match[1]) for match in matches if match)


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint; None if there is none."""
    complete = complete_iterations(directory)
    return directory / iteration_name(complete[-1]) if complete else None


def run_ids(directory: Path) -> dict[int, str | None]:
    """``CheckpointManifest.run_id`` of each complete checkpoint, or ``UNREADABLE``, by ascending iteration."""
    return {iteration: run_id_of(directory / iteration_name(iteration)) for iteration in complete_iterations(directory)}


def run_id_of(folder: Path) -> str | None:
    """``CheckpointManifest.run_id`` of one checkpoint, or ``UNREADABLE``."""
    try:
        return stated(folder).get("run_id")
    except UserError:
        return UNREADABLE


def stated(folder: Path) -> Mapping[str, Any]:
    """The manifest of a checkpoint without its pieces, as JSON; raises UserError if it cannot be read."""
    return read_head(folder, "pieces")


def instead_of(folder: Path) -> str:
    """What to do if the checkpoint in ``folder`` is damaged, which ends the messages that say so.

    A run does not go back by itself: it would train steps again, and overwrite files that may be worth a look.
    """
    match = ITERATION_NAME.fullmatch(folder.name)
    older = [one for one in complete_iterations(folder.parent) if match and one < int(match[1])]
    if not older:
        return f"use another checkpoint: {folder.parent} has no older one"
    replaced, latest = folder.with_name(iteration_name(older[-1])), folder.with_name(LATEST_FILE)
    return (f"use another checkpoint: the newest before it is {replaced}. To continue from it, run `echo {older[-1]} > "
            f"{latest}` and start again, or give --load {replaced}")


def find_checkpoint(directory: str | Path) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint to load, and notes: ``directory`` itself, or the one that ``LATEST_FILE`` in it names."""
    directory = Path(directory)
    if (directory / MANIFEST_FILE).is_file():
        return directory, ()
    complete, latest, notes = complete_iterations(directory), directory / LATEST_FILE, []
    if latest.is_file():
        text = latest.read_text(encoding="utf-8", errors="replace").strip()
        if (iteration := named_iteration(text)) is None:
            raise UserError(f"{latest} holds {text[:40]!r}; expected the number of an iteration, for example 100, "
                            f"or 'release' beside release/mp_rank_*.")
    elif complete:
        iteration = complete[-1]
        notes.append(f"{directory} has no {LATEST_FILE}; the newest complete checkpoint is iteration {iteration}")
    else:
        raise UserError(f"{directory} holds no complete training checkpoint (no iter_*/{MANIFEST_FILE}).")
    chosen = directory / iteration_name(iteration)
    if not (chosen / MANIFEST_FILE).is_file():
        # If a save that replaces a checkpoint is killed between its two renames, the complete old one is left aside.
        asides = [path.parent for path in sorted(directory.glob(f"{chosen.name}.old-*/{MANIFEST_FILE}"))]
        if not asides:
            raise UserError(f"{chosen} has no {MANIFEST_FILE}, so it is not a complete checkpoint; complete ones in "
                            f"{directory}: {', '.join(map(str, complete)) or 'none'}. To use one, write its number "
                            f"into {LATEST_FILE} there.")
        chosen = asides[-1]
        notes.append(f"{chosen} is used, because the save that should have replaced it was interrupted")
    notes += [f"{path} is left over from an interrupted save and is not used; "
              f"{f'--load {path} reads it' if is_only_copy(path) else 'delete it'}"
              for path in sorted(directory.glob("iter_*"))
              if path != chosen and (LEFTOVER_NAME.fullmatch(path.name) or (
                  ITERATION_NAME.fullmatch(path.name) and not (path / MANIFEST_FILE).is_file()))]
    return chosen, tuple(notes)
