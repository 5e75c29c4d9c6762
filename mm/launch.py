"""torchrun for the scripts in ``examples/``: ``python -m mm.launch`` with torchrun's own arguments.

It is the same launcher, except that Ctrl-C and a scheduler's signal end it without a traceback.
"""

import signal
import sys
from collections.abc import Sequence

_SIGNALLED = 128
"""Shells expect this plus the signal's number as the exit status of a program that a signal ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Launch the ranks; return 0 if all of them succeed, or 128 plus the number of the signal that ended them early.

    The ranks themselves report the interruption and what is kept.
    """
    try:
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
    except KeyboardInterrupt:
        return _SIGNALLED + signal.SIGINT
    try:
        torchrun.main(None if argv is None else list(argv))
    except SignalException as error:
        return _SIGNALLED + int(error.sigval)
    except KeyboardInterrupt:  # before torchrun handles signals, and after
        return _SIGNALLED + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
