"""torchrun for the scripts in ``examples/``: ``python -m mm.launch`` with torchrun's own arguments.

The same launcher, except that Ctrl-C and the signal of a scheduler end it without a traceback.  What it launches is not
known here.
"""

import signal
import sys
from collections.abc import Sequence

_SIGNALLED = 128
"""Shells expect this and the number of the signal as the status of a program that a signal ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Launch the ranks and return 0 when all of them have; 128 and the number of a signal that ended them early.

    The ranks report the interruption, and what is kept.
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
