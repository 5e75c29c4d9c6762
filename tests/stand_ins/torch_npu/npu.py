"""What ``torch.npu`` offers that mm asks for: two devices without memory, that remember which one was chosen.

Names and signatures are those of torch_npu 2.13's ``torch_npu/npu``.
"""

import time
from contextlib import contextmanager

import torch

_NUM_DEVICES = 2
_chosen = 0
_generator = torch.Generator()
_jit_compile = True
"""Whether CANN compiles each operator; some CANNs begin with it on, so here it is on until it is turned off."""


def is_available():
    return True


def device_count():
    return _NUM_DEVICES


def current_device():
    return _chosen


def set_device(device):
    """``device``: index, string or torch.device."""
    global _chosen  # noqa: PLW0603  (which device is chosen is the state of the library)
    index = device if isinstance(device, int) else torch.device(device).index
    if not 0 <= index < _NUM_DEVICES:
        raise RuntimeError(f"invalid device index {index}; this machine has {_NUM_DEVICES}")
    _chosen = index


def get_device_name(device_name=None):
    return "Ascend910B3"


def set_compile_mode(jit_compile=False):
    global _jit_compile  # noqa: PLW0603  (it is a state of the library)
    _jit_compile = jit_compile


def is_jit_compile_false():
    return not _jit_compile


def synchronize(device=None): ...


def empty_cache(): ...


def get_amp_supported_dtype():
    """torch asks for it in each recomputation."""
    return [torch.float16, torch.bfloat16, torch.float32]


def max_memory_allocated(device=None):
    return 0


def manual_seed_all(seed):
    _generator.manual_seed(seed)


def get_rng_state(device="npu"):
    return _generator.get_state()


def set_rng_state(new_state, device="npu"):
    _generator.set_state(new_state)


def _is_in_bad_fork():
    return False


class Event:
    """A device that is always done: an event happens when it is recorded."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self._can_time = enable_timing

    def record(self, stream=None):
        self._seconds = time.perf_counter()

    def synchronize(self): ...

    def query(self):
        return hasattr(self, "_seconds")

    def elapsed_time(self, end_event):
        assert self._can_time and end_event._can_time, "both events must be made with enable_timing"
        return 1000 * (end_event._seconds - self._seconds)


class Stream:
    """A queue of work that is always done: what waits for it, or for an event, goes on at once."""

    def wait_event(self, event):
        assert hasattr(event, "_seconds"), "the event was never recorded"

    def wait_stream(self, stream):
        assert isinstance(stream, Stream), f"{stream!r} is no stream"


_current = Stream()


def current_stream(device=None):
    return _current


@contextmanager
def stream(stream):
    """The work of the body goes to ``stream``."""
    global _current  # noqa: PLW0603  (which stream is current is the state of the library)
    around, _current = _current, stream
    yield
    _current = around
