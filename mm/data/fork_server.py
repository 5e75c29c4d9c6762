"""Imported first by the fork server of the workers, and by no other process: the server starts sooner, its workers
share more memory, and all end with the process that they work for.

While the server imports torch, Python's garbage collector would scan the growing number of functions and classes again
and again.  In each worker it would write to all of them, which copies their memory.

PR_SET_PDEATHSIG: the system kills the server, even while it is stopped, when the thread that has started it ends, and
each worker with the server.
"""

import ctypes
import gc
import os
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_SERVER = os.getpid()


def _begin() -> None:
    """In a new worker."""
    gc.enable()
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != _SERVER:  # it has just ended
        os._exit(1)


gc.disable()
_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
os.register_at_fork(before=gc.freeze, after_in_child=_begin)
