"""torchrun for the scripts in ``examples/``: ``python -m mm.launch`` with torchrun's own arguments.

It is the same launcher, except that Ctrl-C, a scheduler's signal and a port in use end it without a traceback, and that
ranks have time to save (torchrun itself would kill them 30 seconds after SIGTERM, and would not pass SIGUSR1 on).
"""

import os
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from mm.environment import without_collection
from mm.process import STOPPING, not_installed, not_loaded, status_after

_DEFAULTS = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "PET_SHUTDOWN_TIMEOUT": "600"}
"""Environment variables that set torchrun's arguments, unless the user does: 10 minutes for a save."""
_IN_USE = "EADDRINUSE"
"""How torch names the error of a port that another process listens on."""
_NAME_SECONDS = 60.0
"""How long the name of the master may be unknown."""


def main(argv: Sequence[str] | None = None) -> int:
    """Launch the ranks; return 0 if all succeed, 2 if they cannot start, or 128 plus the number of a signal.

    The ranks themselves report the interruption and what is kept.
    """
    try:
        with without_collection():
            from torch.distributed import DistNetworkError
            from torch.distributed import run as torchrun
            from torch.distributed.elastic.multiprocessing.api import SignalException
            from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except ModuleNotFoundError as error:
        return not_installed(error)
    except RuntimeError as error:
        return not_loaded(error)
    except KeyboardInterrupt:
        return status_after(signal.SIGINT)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    words = sys.argv[1:] if argv is None else list(argv)
    args = torchrun.parse_args(words)
    if args.nproc_per_node != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, which would print a banner about it
    if (problem := _unknown_host(args)) is not None:
        sys.stderr.write(f"error: {problem}\n")
        return 2
    try:
        with TemporaryDirectory(prefix="torchelastic_") as logs:  # torchrun would leave its own
            os.environ.setdefault("PET_LOG_DIR", logs)
            torchrun.main(words)
    except SignalException as error:
        return status_after(error.sigval)
    except DistNetworkError as error:
        if _IN_USE not in str(error):
            raise
        sys.stderr.write(f"error: MASTER_PORT {args.master_port} (--master_port) is in use on this machine, perhaps by "
                         f"another run that began at the same time; set another one on every node of this run, such as "
                         f"MASTER_PORT={int(args.master_port) + 1}\n")
        return 2
    except ChildFailedError as error:  # a signal that only the ranks received
        statuses = [failure.exitcode for failure in error.failures.values()]
        ended_by_torchrun = (status_after(signal.SIGTERM), -signal.SIGTERM)  # the others, once a rank has failed
        statuses = [status for status in statuses if status not in ended_by_torchrun] or statuses
        for number in STOPPING:
            if all(status in (status_after(number), -number) for status in statuses):  # negative: before its handler
                return status_after(number)
        raise
    except KeyboardInterrupt:  # before torchrun handles signals, and after
        return status_after(signal.SIGINT)
    return 0


def _unknown_host(args: Namespace) -> str | None:
    """The problem if this machine cannot resolve the name of the master of several nodes.

    torchrun would retry for 15 minutes; this does for ``_NAME_SECONDS``, because a cluster may publish the name late.
    """
    if args.nnodes in ("1", "1:1") or args.standalone or args.rdzv_endpoint:
        return None
    until = time.monotonic() + _NAME_SECONDS
    while True:
        try:
            socket.getaddrinfo(args.master_addr, args.master_port)
            return None
        except OSError as error:
            if time.monotonic() > until:
                return (f"{socket.gethostname()} does not know the host {args.master_addr} (--master_addr): "
                        f"{error.strerror}; give the address of node 0, or a name that `getent hosts "
                        f"{args.master_addr}` finds on every node")
        time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main())
