"""Settings of every test process and of the processes that it starts, made before torch is imported."""

import gc
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from tests.files import ROOT

os.environ |= {
    # Processes import this tree, whatever their directory.
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    "OMP_NUM_THREADS": "1",  # several processes share two cores
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch would import any accelerator plugin that is installed
    "HF_HUB_OFFLINE": "1",
}
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile this tree again, half a second of CPU time

# A shell without job control starts what runs in the background with SIGINT ignored, and children inherit that: those
# that tests interrupt would go on for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What is imported and collected stays until the end, so the garbage collector leaves it alone: to scan these million
# objects takes half a second each time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


# No example fails because it is slow: the machine may be busy.
settings.register_profile("no deadline", deadline=None)
settings.register_profile("many", deadline=None, max_examples=300)
settings.load_profile("no deadline")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Report how a test process ended: xdist itself does not say whether it was killed or exited."""
    if error:
        sys.stderr.write(f"\n{node.gateway.id}: {error}; exit status {node.gateway._io.popen.wait(10)}\n")


_POLICY = os.sched_getscheduler(0)


@pytest.fixture(scope="module", autouse=True)
def scheduling_stays() -> Iterator[None]:
    """No file of tests leaves this process realtime; ``tests.data.clips.same_scheduling`` says what would happen."""
    yield
    assert os.sched_getscheduler(0) == _POLICY, "restore it, as tests.data.clips.same_scheduling does"


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Any]:
    """The mesh of the small model on the CPU in a process group of one.

    All tests of this process share it, because its groups have sixty threads.
    """
    from mm.device.device import Device

    Device.pick("cpu")
    import torch.distributed as dist

    from mm.parallel import mesh as parallel
    from tests.tiny import our_config

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield parallel.build_mesh(our_config(((4,),), ((4,),)), tp_size=1, timeout=parallel.timedelta(minutes=1))
    parallel.stop()


@pytest.fixture(scope="session")
def tracing() -> Iterator[ProcessPoolExecutor]:
    """A process for ``tests.meta.step``, which patches it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="session")
def traced(tracing: ProcessPoolExecutor) -> Callable[[Any], Any]:
    """Traces a case, each once."""
    from tests.meta.step import trace

    return cache(lambda case: tracing.submit(trace, case).result())


@pytest.fixture(scope="module")
def torch_npu() -> Iterator[ModuleType]:
    """The stand-in for Ascend's package, importable for the tests of one file only."""
    folder = str(Path(__file__).parent / "stand_ins")
    sys.path.insert(0, folder)
    module = importlib.import_module("torch_npu")
    module.npu.set_compile_mode(jit_compile=False)  # as Device.pick does
    yield module
    sys.path.remove(folder)
    del sys.modules["torch_npu"]
