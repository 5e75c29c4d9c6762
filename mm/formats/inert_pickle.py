"""Reads a pickle as data: numbers, strings, containers, and placeholders for everything else.

**No global of the pickle is imported or called.**  A placeholder records the name of the global and its arguments.
"""

import pickle
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from io import BytesIO
from typing import Any

_HARMLESS_STDLIB = {
    "argparse": ("Namespace",),
    "collections": ("OrderedDict", "defaultdict", "deque", "Counter"),
    "builtins": ("set", "frozenset", "complex", "slice", "range", "bytearray", "bytes", "str", "int", "float", "bool",
                 "list", "tuple", "dict", "object", "type", "getattr"),  # getattr: how Python 3.11 pickles some enums
    "_codecs": ("encode",), "copyreg": ("_reconstructor",), "_io": ("BytesIO",), "io": ("BytesIO",),
    "datetime": ("datetime", "date", "timedelta", "timezone"),
    **dict.fromkeys(("pathlib", "pathlib._local"),  # the latter in Python 3.13
                    ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
    "types": ("SimpleNamespace",), "functools": ("partial",), "signal": ("Signals",),
}  # fmt: skip
"""Globals that Megatron's args and rng_state contain.  Any *other* global of Python itself (os.system, eval) suggests
that the pickle contains code.  It could do no harm here, but such a file is rejected."""


class CodeInPickle(Exception):
    """The pickle refers to a global that runs code; the message is its name, such as ``posix.system``."""


class Opaque:
    """Placeholder for an object of the pickle: the name of its constructor, the arguments, and the state."""

    global_name: str
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any, **_: Any) -> "Opaque":
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop items of a foreign mapping or list, like ``append`` and ``extend``."""

    def append(self, item: Any) -> None:
        """See ``__setitem__``."""

    extend = append


class _InertUnpickler(pickle._Unpickler):
    """The pure-Python unpickler.  The C one allocates gigabytes if a file has a large memo index."""

    def __init__(self, data: bytes) -> None:
        super().__init__(BytesIO(data))
        self._placeholders: dict[str, type[Opaque]] = {}

    def find_class(self, module: str, name: str) -> type:
        # Protocol 2, which torch writes, uses Python 2's names; pickle itself translates them in this order.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full_name = f"{module}.{name}"
        if full_name == "collections.OrderedDict":
            return OrderedDict
        if module.partition(".")[0] in sys.stdlib_module_names and name not in _HARMLESS_STDLIB.get(module, ()):
            raise CodeInPickle(full_name)
        if full_name not in self._placeholders:
            self._placeholders[full_name] = type("Placeholder", (Opaque,), {"global_name": full_name})
        return self._placeholders[full_name]

    def persistent_load(self, pid: Any) -> Any:
        """Return the description of an external object unchanged; torch uses them for storages."""
        return pid


def load(data: bytes) -> Any:
    """Load a pickle.  Objects of classes become instances of ``Opaque``, classes and functions subclasses of it.

    Raises CodeInPickle, and any exception for damaged data.
    """
    return _InertUnpickler(data).load()


def global_name(value: Any) -> str:
    """The name of the global that a placeholder, instance or class, represents; empty for anything else."""
    is_placeholder = isinstance(value, Opaque) or (isinstance(value, type) and issubclass(value, Opaque))
    return value.global_name if is_placeholder else ""
