"""Imported first by the fork server of the workers, and by no other process: the server starts and ends sooner, and its
workers share more memory.

While the server imports torch, Python's garbage collector would scan the growing number of functions and classes again
and again.  In each worker it would write to all of them, which copies their memory.  At its end the server would take
its modules apart, which takes most of a second of CPU time.
"""

import atexit
import gc
import os

_SERVER = os.getpid()


def _end() -> None:
    if os.getpid() == _SERVER:
        os._exit(0)


gc.disable()
os.register_at_fork(before=gc.freeze, after_in_child=gc.enable)
atexit.register(_end)
