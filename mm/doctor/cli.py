"""``mm-doctor``: what a run would find on this machine, each line ok, warning or fault with its cure.

    mm-doctor [--device auto] [--directory DIR] [--hosts HOST ...] [--report FILE]

The checks are in ``mm.doctor.commands``, imported inside ``run_command`` so that a missing package is one line.
"""

import sys
from collections.abc import Sequence

from mm.ending import run_command
from mm.importing import without_collection


def main(argv: Sequence[str] | None = None) -> int:
    """Examine this machine.  Returns the exit status: 0, 1 if there is a fault, 2 for a wrong command line, or 130
    after Ctrl-C."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv), lambda: "nothing was changed")


def _run(words: Sequence[str]) -> int:
    try:
        with without_collection():
            from mm.doctor.commands import run
    except ModuleNotFoundError:
        return _packages()
    return run(words)


def _packages() -> int:
    """Print what can be said in a Python without the packages that the checks need; return the exit status, 1."""
    from mm.doctor.packages import package_findings

    sys.stdout.write("".join(f"{finding.text()}\n" for finding in package_findings()))
    return 1


if __name__ == "__main__":
    sys.exit(main())
