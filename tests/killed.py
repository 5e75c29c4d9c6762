"""A process that is killed in the middle of its changes to the disk."""

import contextlib
import os
import signal
from collections.abc import Callable

CHANGES_DISK = ("fsync", "rename", "replace", "mkdir", "open", "rmdir", "unlink")


def run_killed(action: Callable[[], object], after: int, calls: tuple[str, ...] = CHANGES_DISK) -> bool:
    """Run ``action`` in a process that kills itself right before its ``after``-th one of ``calls``.

    Returns whether it was killed: False if it makes fewer.
    """
    child = os.fork()
    if child == 0:
        remaining = after

        def dying(real):
            def call(*arguments, **options):
                nonlocal remaining
                remaining -= 1
                if remaining <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)
            return call

        with contextlib.suppress(BaseException):
            for name in calls:
                setattr(os, name, dying(getattr(os, name)))
            action()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)
