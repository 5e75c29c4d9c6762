"""Which training checkpoints a directory holds, found by names and heads of manifests, and which one to load.

``<dir>/latest_checkpointed_iteration.txt`` holds the newest iteration as text (Megatron's file); each checkpoint is a
directory ``<dir>/iter_0000010``.  A directory of that name is complete: it is written under another name (``.tmp-``)
and then renamed.  ``iter_0000010.dying`` is what the surviving ranks of a failed run have saved.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm.errors import UserError
from mm.formats.manifest import MANIFEST_FILE, read_head

LATEST_FILE = "latest_checkpointed_iteration.txt"
UNREADABLE = ""
"""Stands for the run id if the manifest cannot be read; no run has this id."""

_MAX_DIGITS = 18
"""Most digits of an iteration's number."""
ITERATION_NAME = re.compile(r"iter_(\d{7,})")
_DYING_NAME = re.compile(r"iter_(\d{7,})\.dying")
LEFTOVER_NAME = re.compile(r"iter_\d{7,}\.(tmp|old)-\w+")


def named_iteration(text: str) -> int | None:
    """The iteration that a text names as a number; None for other text."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def iteration_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def is_complete(directory: Path, iteration: int) -> bool:
    """Whether there is a complete checkpoint of this iteration."""
    return (directory / iteration_name(iteration) / MANIFEST_FILE).is_file()


def complete_iterations(directory: Path) -> list[int]:
    """Iterations of complete checkpoints, ascending."""
    matches = [ITERATION_NAME.fullmatch(path.parent.name) for path in directory.glob(f"iter_*/{MANIFEST_FILE}")]
    return sorted(int(match[1]) for match in matches if match)


def dying_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Iterations and paths of dying checkpoints, ascending."""
    found = [(_DYING_NAME.fullmatch(path.parent.name), path.parent)
             for path in directory.glob(f"iter_*/{MANIFEST_FILE}")]
    return sorted((int(match[1]), path) for match, path in found if match)


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint, also a dying one that training can continue from; None if there is none."""
    complete = complete_iterations(directory)
    if not complete:
        return _dying_after(directory, -1, None)[0]
    newest = directory / iteration_name(complete[-1])
    return _dying_after(directory, complete[-1], newest)[0] or newest


def _dying_after(directory: Path, iteration: int, newest: Path | None) -> tuple[Path | None, list[str]]:
    """The dying checkpoint after ``iteration`` that training continues from, and notes for the user.

    It must have optimizer state, and belong to the run of the ``newest`` regular one, unless there is none.
    """
    notes = list[str]()
    for _, path in reversed([one for one in dying_checkpoints(directory) if one[0] > iteration]):
        try:
            content = stated(path)
        except UserError as error:
            notes.append(f"{path}, which the surviving ranks of a failed run saved, is not used: {error}")
            continue
        if newest is not None and content.get("run_id") != run_id_of(newest):
            continue
        since = "before the first regular checkpoint" if newest is None else f"after {newest}"
        if content.get("optimizer") is not None:
            return path, [*notes, f"training continues from {path}, which the surviving ranks of the failed run saved "
                                  f"{since}; move it away to continue without it"]
        notes.append(f"{path} holds weights that the surviving ranks of the failed run saved {since}; the optimizer "
                     f"state was lost, so it is used only with --load {path} --no-load-optim")
    return None, notes


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
    if _DYING_NAME.fullmatch(folder.name):
        return "move it away, then the run continues from the newest checkpoint before it"
    match, older = ITERATION_NAME.fullmatch(folder.name), list[int]()
    if match:
        older = [iteration for iteration in complete_iterations(folder.parent) if iteration < int(match[1])]
    if not older:
        return f"use another checkpoint: {folder.parent} has no older one"
    replaced, latest = folder.with_name(iteration_name(older[-1])), folder.with_name(LATEST_FILE)
    return (f"use another checkpoint: the newest before it is {replaced}. To continue from it, run `echo {older[-1]} > "
            f"{latest}` and start again, or give --load {replaced}")


def find_checkpoint(directory: str | Path) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint to load, and notes for the user on leftovers of an interrupted save.

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
        chosen, notes = _dying_after(directory, -1, None)
        if chosen is None:
            more = "".join(f" {note}." for note in notes)
            raise UserError(f"{directory} holds no complete training checkpoint (no iter_*/{MANIFEST_FILE}).{more}")
        return chosen, tuple(notes)
    chosen = directory / iteration_name(iteration)
    # If a save that replaces a checkpoint is killed between its two renames, the complete old one is left aside.
    asides = [path.parent for path in sorted(directory.glob(f"{chosen.name}.old-*/{MANIFEST_FILE}"))]
    if not (chosen / MANIFEST_FILE).is_file():
        if not asides:
            raise UserError(
                f"{chosen} has no {MANIFEST_FILE}, so it is not a complete checkpoint; complete ones in {directory}: "
                f"{', '.join(map(str, complete)) or 'none'}. To use one, write its number into {LATEST_FILE} there."
            )
        chosen = asides[-1]
        notes.append(f"{chosen} is used, because the save that should have replaced it was interrupted")
    notes += [
        f"{path} is left over from an interrupted save and is not used; delete it"
        for path in sorted(directory.iterdir())
        if LEFTOVER_NAME.fullmatch(path.name) and path != chosen
    ]
    if not complete or iteration >= complete[-1]:  # an earlier one was chosen on purpose
        dying, more = _dying_after(directory, iteration, chosen)
        return dying or chosen, (*notes, *more)
    return chosen, tuple(notes)
