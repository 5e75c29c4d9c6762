"""Imported by the fork server of data workers, and by no other process, so that it and its workers end with their rank.

The system kills the server when the thread that started it ends, and each worker when the server ends, even if they are
stopped.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_end_with_parent()
os.register_at_fork(after_in_child=_end_with_parent)
