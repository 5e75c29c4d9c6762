"""``mm-plan``: how long the steps of a run take on a device, and with which lists they are shorter, before it starts.

    mm-plan lists -- FLAGS
    mm-plan calibrate --output calibration.json --num-processes 2 -- FLAGS
    mm-plan predict --calibration calibration.json -- FLAGS
    mm-plan compare RUN_DIR --calibration calibration.json -- FLAGS

FLAGS are those of ``python -m mm.train``.  The commands are in ``mm.planner.commands``, imported inside ``run_command``
so that Ctrl-C during the import of torch also ends with a single line.
"""

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
