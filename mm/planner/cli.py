"""``mm-plan``.  Its commands are imported later, so that Ctrl-C during the import of torch also ends with one line."""

import sys
from collections.abc import Sequence

from mm.process import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.  Returns the exit status: 0, 2 for errors that the user can fix, or 130 after Ctrl-C."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv), lambda: "nothing was written")


def _run(words: Sequence[str]) -> int:
    from mm.progress import loading

    with loading():
        from mm.planner.commands import run

    return run(words)


if __name__ == "__main__":
    sys.exit(main())
