"""Importing large libraries without Python's garbage collector, for every command."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep the garbage collector from running in the body, which imports modules, and from scanning them later.

    It would scan the growing number of functions and classes again and again: a third of the time that a command needs
    to start.  They are never garbage, so later collections leave them out.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()
