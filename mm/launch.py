"""torchrun for the scripts in ``examples/``: ``python -m mm.launch`` with torchrun's own arguments.

It is the same launcher, except that Ctrl-C and a scheduler's signal end it without a traceback, and that ranks have
time to save: torchrun itself would kill them 30 seconds after SIGTERM, and would not pass SIGUSR1 on.
"""

import os
import signal
import sys
from collections.abc import Sequence

from mm.ending import not_loaded
from mm.signals import STOPPING, status_after

_DEFAULTS = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "PET_SHUTDOWN_TIMEOUT": "600"}
"""Environment variables that stand for torchrun's arguments, where the user gives none: 10 minutes for a save."""


def main(argv: Sequence[str] | None = None) -> int:
    """Launch the ranks; return 0 if all of them succeed, or 128 plus the number of the signal that ended them early.

    The ranks themselves report the interruption and what is kept.
    """
    try:
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except RuntimeError as error:
        return not_loaded(error)
    except KeyboardInterrupt:
        return status_after(signal.SIGINT)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        torchrun.main(None if argv is None else list(argv))
    except SignalException as error:
        return status_after(error.sigval)
    except ChildFailedError as error:  # a signal that only the ranks received
        _, failure = error.get_first_failure()
        for number in STOPPING:
            if failure.exitcode in (status_after(number), -number):  # negative: before the rank could handle it
                return status_after(number)
        raise
    except KeyboardInterrupt:  # before torchrun handles signals, and after
        return status_after(signal.SIGINT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
