"""Imported by the fork server of the workers alone: lets it end at once.

Python would first take its modules apart, which takes most of a second of a processor where torch is one of them.
"""

import atexit
import os

_SERVER = os.getpid()


def _end() -> None:
    if os.getpid() == _SERVER:
        os._exit(0)


atexit.register(_end)
