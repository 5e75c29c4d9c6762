"""Which training checkpoints a directory holds, found by names and heads of manifests, and which one to load.

``<dir>/latest_checkpointed_iteration.txt`` holds the newest iteration as text (Megatron's file); each checkpoint is a
directory ``<dir>/iter_0000010``.  A directory of that name is complete: it is written under another name (``.tmp-``)
and then renamed.  Any other directory is a leftover, and counts as nothing.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm.checkpoint.manifest import MANIFEST_FILE, read_head
from mm.errors import UserError

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

    A run does not go back to an older checkpoint by itself: it would train the steps since then again, and overwrite
    files that may still be worth a look.
    """
    match = ITERATION_NAME.fullmatch(folder.name)
    older = [one for one in complete_iterations(folder.parent) if match and one < int(match[1])]
    if not older:
        return f"use another checkpoint: {folder.parent} has no older one"
    replaced, latest = folder.with_name(iteration_name(older[-1])), folder.with_name(LATEST_FILE)
    return (f"use another checkpoint: the newest before it is {replaced}. To continue from it, run `echo {older[-1]} > "
            f"{latest}` and start again, or give --load {replaced}")


def find_checkpoint(directory: str | Path) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint to load, and notes for the user.

    ``directory`` is one checkpoint, or the directory of all of them, in which ``latest_checkpointed_iteration.txt``
    names one.  Raises UserError if there is none.
    """
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
            raise UserError(
                f"{chosen} has no {MANIFEST_FILE}, so it is not a complete checkpoint; complete ones in {directory}: "
                f"{', '.join(map(str, complete)) or 'none'}. To use one, write its number into {LATEST_FILE} there."
            )
        chosen = asides[-1]
        notes.append(f"{chosen} is used, because the save that should have replaced it was interrupted")
    notes += [f"{path} is left over from an interrupted save and is not used; "
              f"{f'--load {path} reads it' if is_only_copy(path) else 'delete it'}"
              for path in sorted(directory.glob("iter_*"))
              if path != chosen and (LEFTOVER_NAME.fullmatch(path.name) or (
                  ITERATION_NAME.fullmatch(path.name) and not (path / MANIFEST_FILE).is_file()))]
    return chosen, tuple(notes)
