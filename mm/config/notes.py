"""Notes: what a user should know about valid settings.

Notes on what changes results are printed at every start.  Settings without effect are only counted there, and listed
on request.
"""

from collections.abc import Iterable


class NoEffect(str):
    """A note that settings have no effect; it starts with their names."""

    num_settings: int

    def __new__(cls, names: Iterable[str], why: str, file: object = None) -> "NoEffect":
        """``names``: flags, or key paths of ``file``.  ``why``: the reason."""
        names = list(names)
        note = super().__new__(cls, f"{', '.join(names)}{f' of {file}' if file else ''}: no effect: {why}")
        note.num_settings = len(names)
        return note

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle, which would call ``__new__`` with the text alone: rank 0 sends its run to other nodes."""
        return str.__new__, (NoEffect, str(self)), vars(self)


def sorted_notes(notes: Iterable[str]) -> list[str]:
    """Each note once: first what may change results, then what has no effect."""
    return sorted(dict.fromkeys(notes), key=lambda note: isinstance(note, NoEffect))


def notes_at_start(notes: Iterable[str]) -> list[str]:
    """``sorted_notes``, but several notes on settings without effect are replaced by their number."""
    in_order = sorted_notes(notes)
    idle = [note for note in in_order if isinstance(note, NoEffect)]
    if len(idle) <= 1:
        return in_order
    num_settings = sum(note.num_settings for note in idle)
    return [*in_order[: -len(idle)],
            f"{num_settings} settings have no effect here; the same command with --check lists them, with the reasons"]
