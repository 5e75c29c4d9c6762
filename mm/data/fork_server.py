"""Imported first by the fork server of the workers, and by no other process: it starts and ends sooner, and its workers
share more memory.

Python would scan the growing number of functions and classes while the server imports torch, and the workers would
write to all of them when they scan them again.  At its end it would take its modules apart, which takes most of a
second of a processor.
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
