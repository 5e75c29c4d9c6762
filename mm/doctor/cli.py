"""``mm-doctor``: what a run would find on this machine, each line ok, warning or fault with its cure.

    mm-doctor [--device auto] [--directory DIR] [--hosts HOST ...] [--report FILE]

The checks are in ``mm.doctor.commands``, imported inside ``run_command`` so that a missing package is one line.
"""

import sys
from collections.abc import Sequence

from mm.ending import refused, run_command
from mm.errors import UserError
from mm.importing import without_collection


def main(argv: Sequence[str] | None = None) -> int:
    """Examine this machine.  Returns the exit status: 0, 1 if there is a fault, 2 for a wrong command line, or 130
    after Ctrl-C."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv), lambda: "nothing was changed")


def _run(words: Sequence[str]) -> int:
    with without_collection():
        from mm.doctor.commands import run

    try:
        return run(words)
    except UserError as error:
        return refused(error)


if __name__ == "__main__":
    sys.exit(main())
